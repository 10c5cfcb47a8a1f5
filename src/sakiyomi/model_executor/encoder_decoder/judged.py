"""The errors of an encoder-decoder model's quantized layers, measured on a source and a text before it is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sakiyomi.cache.cross_attention import Source
from sakiyomi.kernels.quantization import choose_bits, layer_errors
from sakiyomi.model_executor.encoder_decoder.families import Family, family_of


@dataclass(frozen=True)
class Judged:
    """The measurements of a whole model.

    Attributes:
        source: the input of the encoder.
        text: token ids, the input of the decoder.
        bits: see ``choose_bits``.
        logits: (len(text), V) of the model's own weights.
    """

    source: Source
    text: list[int]
    bits: dict[int, int]
    logits: Tensor


def judge_whole(model: Any, text: Sequence[int], kind: str) -> Judged:
    """Measure the layers of a whole model.

    Encoder and decoder both read the text, up to their number of positions. The encoder of a speech model reads noise.

    Args:
        model: a structural copy of the user's model; its attention is left switched.
        text: token ids.
        kind: "int8" or "int4".

    Raises:
        UnsupportedError: its family is not supported.
    """
    config, family = model.config, family_of(model.config)
    own = list(text)[: int(getattr(config, family.limit))] if family.limit else list(text)
    source = noise_source(config, family, text, model.dtype)
    model.set_attn_implementation("eager")
    inputs = source.inputs | {"decoder_input_ids": torch.tensor([own])}
    errors, logits = layer_errors(model, inputs, {kind, "int8"})
    return Judged(source, own, choose_bits(kind, errors, model.get_output_embeddings()), logits)


def noise_source(config: Any, family: Family, text: Sequence[int], dtype: torch.dtype) -> Source:
    """A text as a source, or noise as that of a speech model."""
    limit = family.source_positions(config)
    if not family.takes_audio:
        ids = list(text)[:limit]
        return Source({"input_ids": torch.tensor([ids])}, len(ids))
    assert limit is not None, "a speech model has positions"
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, int(config.num_mel_bins), 2 * limit, generator=generator).to(dtype)
    return Source({"input_features": noise}, limit)
