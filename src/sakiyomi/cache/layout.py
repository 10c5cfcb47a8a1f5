"""The contract of a cache of keys and values: the shape of a layer, the views of a slot, what others may ask of it.

``slots.py`` has the cache itself; whoever only reads it (policies, quantized storage, rotations) knows this file alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["KVCache", "LayerShape", "Part"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV heads, sizes of a key and of a value, the device, and the sliding window (0: none) of one attention layer."""

    heads: int
    key_dim: int
    value_dim: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    window: int = 0

    def pair_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in this layer."""
        return self.heads * (self.key_dim + self.value_dim) * itemsize


class Part(NamedTuple):
    """Heads of one layer of a slot that have dropped equally many pairs.

    Attributes:
        heads: which.
        keys, values: (heads, room, dim), views of the storage itself.
        dropped: pairs that are not there; column c holds the token at place c + dropped, or one before it.
        packed: how many of those are quantized and stored elsewhere; they come before column 0.
    """

    heads: slice
    keys: Tensor
    values: Tensor
    dropped: int
    packed: int = 0


class KVCache(Protocol):
    """What policies, quantized storage and rotations ask of a cache."""

    @property
    def shapes(self) -> Sequence[LayerShape]:
        """One per attention layer."""

    def lent(self, columns: int) -> AbstractContextManager[int]:
        """A slot with room for so many tokens, for a pass that belongs to no request."""

    def parts(self, layer: int, slot: int) -> Sequence[Part]:
        """A slot's keys and values in one layer, grouped by heads that have dropped equally many pairs."""

    def renew(self) -> None:
        """Have whoever keeps pointers to the storage renew them before the next pass."""
