"""The logits processors that transformers' ``generate`` makes of an encoder-decoder model's generation settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

__all__ = ["default_processors"]


def default_processors(
    settings: Any, begin: int, last: int, source: Any, *, no_end: bool = False
) -> list[transformers.LogitsProcessor]:
    """Transformers' own processors in the order in which ``generate`` has them.

    Args:
        settings: a GenerationConfig; its settings of beams and sampling are not used.
        begin: number of tokens that the decoder begins with.
        last: most tokens of the decoder, those included.
        source: (1, n) the encoder's tokens; None: it has none.
        no_end: end tokens do not end the text, so that none is forced or suppressed.
    """
    t: Any = transformers
    ends = settings.eos_token_id
    end = torch.tensor(ends if isinstance(ends, list) else [ends]) if ends is not None else None
    reads, ended, stops = source is not None, end is not None, end is not None and not no_end
    after = begin if begin > 1 or getattr(settings, "forced_bos_token_id", None) is None else begin + 1
    # By the name of a setting: its value that changes nothing beside None, whether it applies here, and the processor.
    table: list[tuple[str, Any, bool, Callable[[Any], Any]]] = [
        ("sequence_bias", None, True, lambda bias: t.SequenceBiasLogitsProcessor(sequence_bias=bias)),
        ("encoder_repetition_penalty", 1.0, reads, lambda p: t.EncoderRepetitionPenaltyLogitsProcessor(p, source)),
        ("repetition_penalty", 1.0, True, t.RepetitionPenaltyLogitsProcessor),
        ("no_repeat_ngram_size", 0, True, t.NoRepeatNGramLogitsProcessor),
        ("encoder_no_repeat_ngram_size", 0, reads, lambda n: t.EncoderNoRepeatNGramLogitsProcessor(n, source)),
        ("bad_words_ids", None, True, lambda words: t.NoBadWordsLogitsProcessor(words, end)),
        ("min_length", 0, stops, lambda least: t.MinLengthLogitsProcessor(least, end)),
        ("min_new_tokens", 0, stops, lambda least: t.MinNewTokensLengthLogitsProcessor(begin, least, end)),
        ("forced_bos_token_id", None, True, t.ForcedBOSTokenLogitsProcessor),
        ("forced_eos_token_id", None, not no_end, lambda token: t.ForcedEOSTokenLogitsProcessor(last, token)),
        ("remove_invalid_values", False, True, lambda _: t.InfNanRemoveLogitsProcessor()),
        ("exponential_decay_length_penalty", None, ended, lambda p: t.ExponentialDecayLengthPenalty(p, end, begin)),
        ("suppress_tokens", None, True, t.SuppressTokensLogitsProcessor),
        ("begin_suppress_tokens", None, True, lambda ids: t.SuppressTokensAtBeginLogitsProcessor(ids, after)),
    ]
    values = [getattr(settings, name, None) for name, *_ in table]
    return [
        make(value)
        for value, (_, neutral, applies, make) in zip(values, table, strict=True)
        if applies and value is not None and value != neutral
    ]
