"""What the compiled kernels read of a cache: protocols, so that they know no cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["KVShape", "KVStorage", "QuantizedStorage", "SourceStorage"]


class KVShape(Protocol):
    """KV heads of a layer, and the sizes of a key and of a value."""

    @property
    def heads(self) -> int:
        """KV heads."""

    @property
    def key_dim(self) -> int:
        """Numbers of a key."""

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""


class QuantizedStorage(Protocol):
    """Columns that are stored in few bits, see ``cache.quantized.QuantizedKV``."""

    count: Tensor
    stores: list[list[Tensor]]
    bits: int
    room: int

    def rooms(self, room: int) -> list[int]:
        """Columns of each layer, where the largest have so many."""

    def uniform(self, layer: int) -> list[Tensor | None]:
        """Key codes and scales, value codes and scales."""

    def leveled(self, layer: int) -> tuple[list[Tensor], list[int]]:
        """Where codes stand for levels: the first arguments of ``sk_leveled``, and its numbers."""


class KVStorage(Protocol):
    """Keys and values by layer, see ``cache.slots.SlotCache``."""

    dtype: torch.dtype
    keys: list[Tensor]
    values: list[Tensor]
    starts: list[list[int]]
    dropped: Tensor | None
    gather: Callable[[int, int, Sequence[int]], None] | None

    @property
    def shapes(self) -> Sequence[KVShape]:
        """One per attention layer."""

    @property
    def packed(self) -> QuantizedStorage | None:
        """Columns that are quantized; None: none ever are."""


class SourceStorage(KVStorage, Protocol):
    """Keys and values for cross-attention, see ``cache.cross_attention.SourceCache``."""

    lengths: Tensor
