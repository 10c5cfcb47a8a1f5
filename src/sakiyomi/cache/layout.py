"""The contract of a cache of keys and values: the shape of a layer, the views of a slot, what others may ask of it.

``slots.py`` has the cache itself; whoever only reads it (policies, quantized storage, rotations) knows this file alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["KVCache", "LayerShape", "Part"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps, and how far its rows see.

    Attributes:
        heads: of keys and values.
        key_dim, value_dim: sizes of a key and of a value.
        device: of the layer.
        window: positions that a row sees, itself among them; 0: all before it.
        chunk: a row sees its own chunk of so many positions alone; 0: there are no chunks.
        sinks: (query heads,) float32, a score of each head that takes part in its softmax and belongs to no key; None:
            there are none.
        slopes: (query heads,) float32, what a score loses by position that its key lies before the row (ALiBi); None:
            nothing.
    """

    heads: int
    key_dim: int
    value_dim: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    window: int = 0
    chunk: int = 0
    sinks: Tensor | None = field(default=None, compare=False)
    slopes: Tensor | None = field(default=None, compare=False)

    @property
    def reach(self) -> int:
        """The window as operators of attention are told it, or the chunk as a negative number."""
        return -self.chunk if self.chunk else self.window

    @property
    def plain(self) -> bool:
        """Whether softmax runs over scores of keys alone, of all keys or of those in a window."""
        return not self.chunk and self.sinks is None and self.slopes is None

    def as_json(self) -> list[Any]:
        """All but the device, for a file."""
        tables = [None if table is None else table.tolist() for table in (self.sinks, self.slopes)]
        return [self.heads, self.key_dim, self.value_dim, self.window, self.chunk, *tables]

    @classmethod
    def from_json(cls, about: Sequence[Any]) -> LayerShape:
        """What ``as_json`` gave, on the CPU; in older files the last ones are missing."""
        tables = [None if table is None else torch.tensor(table) for table in about[5:]]
        return cls(*about[:3], torch.device("cpu"), *about[3:5], *tables)

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
