"""Turns what transformers' ``generate`` prepared into prompts and parameters; refuses by name what is not supported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from sakiyomi.cache.cross_attention import Source
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.hf_names import CACHE
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.encoder_inputs import token_source
from sakiyomi.engine.hf_generate.engines import NO_TEXT
from sakiyomi.engine.inputs import TokenizedPrompt, prompt_tokens
from sakiyomi.model_executor.encoder_decoder.families import family_of
from sakiyomi.model_executor.loading import has_encoder
from sakiyomi.model_executor.runner import ModelRunner

_WARPERS: dict[type, str] = {
    transformers.TemperatureLogitsWarper: "temperature",
    transformers.TopKLogitsWarper: "top_k",
    transformers.TopPLogitsWarper: "top_p",
    transformers.MinPLogitsWarper: "min_p",
}
"""Our parameter for each, in the order in which the sampler applies them too."""
_BY_ROW = (
    transformers.RepetitionPenaltyLogitsProcessor,
    transformers.PrefixConstrainedLogitsProcessor,
    transformers.EncoderRepetitionPenaltyLogitsProcessor,
    transformers.EncoderNoRepeatNGramLogitsProcessor,
)
"""Transformers' processors that look at which row of the batch is theirs."""
_STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale (negative_prompt_ids)",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "DiaClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config (SynthID)",
    "WhisperNoSpeechDetection": "no_speech_threshold",
}
"""Processors that run the model or remember the step before: a draft would be verified with the wrong step's values."""
_MODES = {
    "beam_search": "num_beams",
    "beam_sample": "num_beams",
    "group_beam_search": "num_beam_groups",
    "constrained_beam_search": "constraints / force_words_ids",
    "contrastive_search": "penalty_alpha",
    "dola_generation": "dola_layers",
}
_DECODER = frozenset({"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"})
_TAKEN = {False: _DECODER, True: _DECODER | {"encoder_outputs", "decoder_attention_mask"}}
"""Arguments of ``forward`` that are supported, without an encoder (False) and with one (True)."""


def _refused(name: str, value: Any, remedy: str = "") -> UnsupportedError:
    shown = " ".join(repr(value).split())
    return UnsupportedError(
        f"{name}={shown:.60} cannot be honoured with custom_generate=sakiyomi.custom_generate; "
        f"{remedy or 'leave one of the two out'}"
    )


def check_settings(config: Any, kwargs: Mapping[str, Any], synced_gpus: bool, *, encoder: bool) -> None:
    """Refuse settings that would change the text or the result and are not supported here.

    Args:
        config: the GenerationConfig that ``generate`` put together.
        kwargs: arguments for the model's ``forward``.
        synced_gpus: several processes must stay in step.
        encoder: whether the model has an encoder.

    Raises:
        UnsupportedError: it names the argument and says what to do.
    """
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    if mode in _MODES:
        argument = _MODES[mode]
        value = getattr(config, argument.split(" ")[0], None)
        raise _refused(argument, value, "only sampling and greedy search are supported: leave custom_generate out")
    if synced_gpus:
        raise _refused("synced_gpus", True, "the processes would not stay in step: leave custom_generate out")
    if not config.use_cache:
        raise _refused("use_cache", False, "keys and values are always kept: leave use_cache out")
    if config.cache_implementation not in (None, "dynamic"):
        raise _refused(
            "cache_implementation",
            config.cache_implementation,
            "the cache is sakiyomi's own: leave it out, or use sakiyomi.LLM(cache='quant-4') for a smaller one",
        )
    for name in ("use_mtp", "speculation_type", "assistant_ensemble_weight"):
        if getattr(config, name, None):
            raise _refused(name, getattr(config, name), "leave it out, and choose a draft by assistant_model=")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise _refused(name, True, "run the model's forward over the finished text for them")
    cache = kwargs.get(CACHE)
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise _refused(
            CACHE,
            type(cache).__name__,
            "give the whole prompt without a cache; sakiyomi.LLM(...).conversation() keeps one between prompts",
        )
    for name, value in kwargs.items():
        if name not in _TAKEN[encoder] and value is not None and value is not False:
            kind = type(value).__name__ if isinstance(value, Tensor) else value
            remedy = "give input_ids instead" if name == "inputs_embeds" else "leave custom_generate out"
            raise _refused(name, kind, remedy)


def end_tokens(criteria: Sequence[Any]) -> list[int]:
    """Tokens that end a text by transformers' own criterion."""
    found = [c.eos_token_id for c in criteria if type(c) is transformers.EosTokenCriteria]
    return sorted({int(token) for ids in found for token in ids.tolist() if token >= 0})


def length_limit(criteria: Sequence[Any], config: Any) -> int:
    """Most tokens of a row, padding and prompt included."""
    own = [int(c.max_length) for c in criteria if type(c) is transformers.MaxLengthCriteria]
    return min([*own, int(config.max_length)]) if own else int(config.max_length)


def prompts(
    ids: Tensor,
    kwargs: Mapping[str, Any],
    inputs: Tensor | None,
    config: Any,
    target: ModelRunner,
    params: SamplingParams,
    processors: Sequence[Any],
) -> list[TokenizedPrompt]:
    """What each row of the batch begins with.

    Args:
        ids: (B, L) prompts with their padding, which must lie on the left.
        kwargs: arguments for the model's ``forward``: masks and positions among them.
        inputs: what the model's encoder reads; not used where it has none.
        config: of the model.
        target: the model as it runs.
        params, processors: of the whole batch.

    Raises:
        InputError: padding elsewhere, or tokens that the model does not know.
        UnsupportedError: positions that do not count a row's tokens from 0 on, or ``encoder_outputs`` were given.
    """
    encoder = has_encoder(config)
    mask = kwargs.get("decoder_attention_mask" if encoder else "attention_mask")
    positions = None if encoder else kwargs.get("position_ids")
    sources: list[Source | None] = [None] * len(ids)
    if encoder:
        assert inputs is not None
        sources = _sources(config, inputs, kwargs.get("attention_mask"), len(ids), target.vocab_size)
    made = []
    for i, (row, source) in enumerate(zip(ids, sources, strict=True)):
        pad = _padding(mask, i, ids.shape[1], "attention_mask")
        if positions is not None and not _counted(positions, i, pad):
            raise _refused("position_ids", "a tensor", "positions count a prompt's tokens from 0 on: leave it out")
        tokens = prompt_tokens(
            row[pad:].tolist(), NO_TEXT, target.vocab_size, target.max_context, target.weights.context_note
        )
        own = list(processors)
        if len(ids) > 1 or pad:
            own = [_OfRow(processor, i, len(ids), ids[i : i + 1, :pad]) for processor in own]
        made.append(TokenizedPrompt(tokens, replace(params, logits_processors=own), source))
    return made


def _padding(mask: Tensor | None, row: int, length: int, name: str) -> int:
    """How many tokens of a row are padding, all of them on the left."""
    if mask is None:
        return 0
    if mask.dim() != 2 or mask.shape[1] != length:
        raise InputError(f"{name} has the shape {tuple(mask.shape)}; expected a row of {length} for each prompt")
    values = mask[row] != 0
    pad = int(values.int().argmax())
    if not bool(values[pad:].all()):
        raise InputError(
            f"{name} of row {row} has zeros behind its first token; prompts are padded on the left "
            "(tokenizer.padding_side = 'left')"
        )
    return pad


def _counted(positions: Tensor, row: int, pad: int) -> bool:
    if positions.dim() != 2:
        return False
    own = positions[row if positions.shape[0] > 1 else 0, pad:]
    return bool(torch.equal(own, torch.arange(own.shape[0], device=own.device, dtype=own.dtype)))


def sampling(processors: Sequence[Any], do_sample: bool) -> tuple[SamplingParams, list[Any]]:
    """Sampling parameters from the last warpers (temperature, top-k, top-p, min-p), and the processors before them.

    Raises:
        UnsupportedError: a processor that depends on more than tokens and logits.
    """
    left = list(processors)
    for processor in left:
        argument = _STATEFUL.get(type(processor).__name__)
        if argument is not None:
            raise _refused(argument, type(processor).__name__)
    while left and type(left[-1]) is transformers.LogitNormalization:  # it changes no choice
        left.pop()
    if not do_sample:
        return SamplingParams(temperature=0.0), left
    values: dict[str, Any] = {"temperature": 1.0}
    earlier = list(_WARPERS)
    while left and type(left[-1]) in earlier and _as_ours(left[-1]):
        warper = left.pop()
        earlier = earlier[: earlier.index(type(warper))]
        name = _WARPERS[type(warper)]
        values[name] = (int if name == "top_k" else float)(getattr(warper, name))
    return SamplingParams(**values), left


def _as_ours(warper: Any) -> bool:
    """Whether one of transformers' warpers does what our parameter of that name does: it has no unusual settings."""
    if getattr(warper, "filter_value", -math.inf) != -math.inf or getattr(warper, "min_tokens_to_keep", 1) != 1:
        return False
    return getattr(warper, "top_p", 1.0) > 0  # theirs keeps the most probable token at 0


def _by_row(processor: Any) -> bool:
    """Whether a processor may depend on the row's place in the batch; of a user's own that is not known."""
    if not type(processor).__module__.startswith("transformers."):
        return True
    return type(processor) in _BY_ROW and getattr(processor, "prompt_ignore_length", 0) is not None


class _OfRow:
    """Calls a processor with one row: with its padding, and at its own place in the batch.

    Args:
        processor: transformers' or the user's.
        row, batch: the row's place, and how many there are.
        padding: (1, n) tokens before the row's own.
    """

    def __init__(self, processor: Any, row: int, batch: int, padding: Tensor) -> None:
        self._processor, self._padding = processor, padding
        self._row, self._batch = (row, batch) if _by_row(processor) else (0, 1)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        ids = torch.cat([self._padding.to(ids.device), ids], 1)
        every = self._processor(ids.expand(self._batch, -1), scores.repeat(self._batch, 1))
        own: Tensor = every[self._row : self._row + 1]
        return own


def _sources(config: Any, given: Tensor, mask: Tensor | None, rows: int, vocab_size: int) -> list[Source | None]:
    """The encoder's source for each row; rows of the same prompt share it.

    Args:
        config: of an encoder-decoder model.
        given: (prompts, n) tokens, or (prompts, bins, frames) features.
        mask: (rows, n), 0 where a token is padding; None: nowhere.
        rows: of the batch, a multiple of the prompts.
        vocab_size: width of the logits.

    Raises:
        InputError: padding on the left.
        UnsupportedError: ``encoder_outputs`` were given instead of what the encoder reads.
    """
    family, each = family_of(config), rows // given.shape[0]
    made: list[Source] = []
    for i, row in enumerate(given):
        if family.takes_audio:
            made.append(Source({"input_features": row[None]}, int(family.source_positions(config) or 0)))
            continue
        if row.is_floating_point() or bool((row < 0).any()):
            raise _refused("encoder_outputs", "a tensor", "give input_ids: the encoder is run here")
        pad = 0 if mask is None else _padding(mask[i * each].flip(0)[None], 0, row.shape[0], "attention_mask")
        made.append(token_source(row[: row.shape[0] - pad].tolist(), config, vocab_size))
    return [source for source in made for _ in range(each)]
