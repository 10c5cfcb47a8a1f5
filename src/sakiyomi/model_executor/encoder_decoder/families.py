"""The differences between transformers' families of encoder-decoder models, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sakiyomi.core.errors import UnsupportedError


@dataclass(frozen=True)
class Family:
    """Names of the parts of a family's decoder, and the input of its encoder.

    Attributes:
        name: models of the same family can work together.
        layers: name of the decoder's list of layers.
        cross: path of the cross-attention in a layer.
        own: path of the self-attention if ours replaces it, because it derives a bias from columns; None: it stays.
        parts: names of the projections of an attention module: queries, keys, values, output.
        heads: name of its number of heads.
        results: number of values that an attention module returns.
        positions: name of the decoder's module that embeds positions; None: it has none.
        scales: the decoder itself multiplies embeddings by ``embed_scale`` before it adds positions.
        count, limit: settings with the number of the decoder's layers and of its positions (None: no limit).
        source_limit: setting with the number of the encoder's positions (None: no limit).
        vocabulary: setting with the width of the logits, if it is not ``vocab_size``.
        takes_audio: the encoder takes features of audio, not tokens.
    """

    name: str
    layers: str = "layers"
    cross: str = "encoder_attn"
    own: str | None = None
    parts: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "out_proj")
    heads: str = "num_heads"
    results: int = 2
    positions: str | None = "embed_positions"
    scales: bool = False
    count: str = "decoder_layers"
    limit: str | None = "max_position_embeddings"
    source_limit: str | None = "max_position_embeddings"
    vocabulary: str = "vocab_size"
    takes_audio: bool = False

    def source_positions(self, config: Any) -> int | None:
        """Most places of a source (tokens, or frames of audio); None: no limit."""
        return None if self.source_limit is None else int(getattr(config, self.source_limit))


_T5 = Family(
    "t5",
    layers="block",
    cross="layer.1.EncDecAttention",
    own="layer.0.SelfAttention",
    parts=("q", "k", "v", "o"),
    heads="n_heads",
    results=3,
    positions=None,
    count="num_decoder_layers",
    limit=None,
    source_limit=None,
)

FAMILIES: dict[str, Family] = {
    "bart": Family("bart"),
    "mbart": Family("mbart"),
    "pegasus": Family("pegasus", scales=True),
    "marian": Family("marian", scales=True, vocabulary="decoder_vocab_size"),
    "t5": _T5,
    "mt5": _T5,
    "whisper": Family("whisper", limit="max_target_positions", source_limit="max_source_positions", takes_audio=True),
}
"""By ``model_type``."""


def family_of(config: Any, name: str = "the model") -> Family:
    """The family of a configuration.

    Args:
        config: of an encoder-decoder model.
        name: the user's name of the model.

    Raises:
        UnsupportedError: the family is not supported.
    """
    found = FAMILIES.get(config.model_type)
    if found is None:
        raise UnsupportedError(
            f"{name!r} is an encoder-decoder model of the type {config.model_type!r}; supported are "
            f"{', '.join(FAMILIES)}; use transformers' generate() for it"
        )
    return found
