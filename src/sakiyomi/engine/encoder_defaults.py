"""The logits processors that transformers' ``generate`` makes of an encoder-decoder model's generation settings."""

from __future__ import annotations

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
    ends = settings.eos_token_id
    end = torch.tensor(ends if isinstance(ends, list) else [ends]) if ends is not None else None

    def given(name: str, neutral: Any = None) -> Any:
        value = getattr(settings, name, None)
        return None if value == neutral else value

    made: list[Any] = []
    if (bias := given("sequence_bias")) is not None:
        made.append(transformers.SequenceBiasLogitsProcessor(sequence_bias=bias))
    if (penalty := given("encoder_repetition_penalty", 1.0)) is not None and source is not None:
        made.append(transformers.EncoderRepetitionPenaltyLogitsProcessor(penalty, source))
    if (penalty := given("repetition_penalty", 1.0)) is not None:
        made.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    if (size := given("no_repeat_ngram_size", 0)) is not None:
        made.append(transformers.NoRepeatNGramLogitsProcessor(size))
    if (size := given("encoder_no_repeat_ngram_size", 0)) is not None and source is not None:
        made.append(transformers.EncoderNoRepeatNGramLogitsProcessor(size, source))
    if (words := given("bad_words_ids")) is not None:
        made.append(transformers.NoBadWordsLogitsProcessor(words, end))
    if end is not None and not no_end:
        if (least := given("min_length", 0)) is not None:
            made.append(transformers.MinLengthLogitsProcessor(least, end))
        if (least := given("min_new_tokens", 0)) is not None:
            made.append(transformers.MinNewTokensLengthLogitsProcessor(begin, least, end))
    if (token := given("forced_bos_token_id")) is not None:
        made.append(transformers.ForcedBOSTokenLogitsProcessor(token))
    if (token := given("forced_eos_token_id")) is not None and not no_end:
        made.append(transformers.ForcedEOSTokenLogitsProcessor(last, token))
    if given("remove_invalid_values", False) is not None:
        made.append(transformers.InfNanRemoveLogitsProcessor())
    if (decay := given("exponential_decay_length_penalty")) is not None and end is not None:
        made.append(transformers.ExponentialDecayLengthPenalty(decay, end, begin))
    if (tokens := given("suppress_tokens")) is not None:
        made.append(transformers.SuppressTokensLogitsProcessor(tokens))
    if (tokens := given("begin_suppress_tokens")) is not None:
        after = begin if begin > 1 or given("forced_bos_token_id") is None else begin + 1
        made.append(transformers.SuppressTokensAtBeginLogitsProcessor(tokens, after))
    return made
