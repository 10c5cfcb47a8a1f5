"""What a cache asks of the model that it serves. ``ModelRunner`` is one; training has a smaller one of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from sakiyomi.cache.layout import KVCache
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.native import PackedWeights

__all__ = ["CacheHost"]


class CacheHost(Protocol):
    """A model that can run passes over its own cache.

    Attributes:
        device: where its inputs go.
        dtype: of its weights, and of the cache.
        vocab_size: logits in a row.
        max_context: tokens of the longest text that it serves.
        text: token ids to measure on; empty where none were given.
        passes_here: attention is computed by our operators; else the model keeps its own.
    """

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_context: int
    text: list[int]
    passes_here: bool

    @property
    def module(self) -> nn.Module:
        """The transformers model as it runs."""
        ...

    @property
    def cache(self) -> KVCache:
        """The keys and values that its passes write."""
        ...

    @property
    def sources(self) -> KVCache | None:
        """The keys and values of an encoder's sources; None: it has no encoder."""
        ...

    @property
    def packed_weights(self) -> PackedWeights | None:
        """The compiled kernels' weights, which can take in further linear layers; None where plain torch runs."""
        ...

    def score(self, segments: Sequence[SequenceRows], *, last: bool = False) -> Tensor:
        """One pass: (rows, V) logits, or with `last` those of each segment's last row."""
        ...

    def read_alone(self, slot: int, token: int, position: int) -> None:
        """Write one token into an empty slot as if it stood at this position."""
        ...
