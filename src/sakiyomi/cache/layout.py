"""The interface of a cache of keys and values: the shape of a layer, views of a slot, and the operations for readers.

``slots.py`` has the cache itself. Policies, quantized storage and rotations, which only read it, import only this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_STORED = ("heads", "key_dim", "value_dim", "window", "chunk", "sinks", "alibi", "tied", "source")
"""Fields of a ``LayerShape`` in files, in this order."""


class Alibi(NamedTuple):
    """What ALiBi adds to scores: (position of the key) * slope * unit.

    Attributes:
        slopes: (query heads,) float32.
        unit: of the slopes.
        coarse: position * slope is rounded to bfloat16, as the model's class does.
    """

    slopes: Tensor
    unit: float = 1.0
    coarse: bool = False

    def scores(self, heads: slice, positions: Tensor) -> Tensor:
        """Of these query heads (heads, 1, n), float32."""
        found = self.slopes[heads, None, None].to(positions.device) * positions
        return self.unit * (found.bfloat16().float() if self.coarse else found)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one attention layer's keys and values, and the positions that its rows attend to.

    Attributes:
        heads: of keys and values.
        key_dim, value_dim: sizes of a key and of a value.
        device: of the layer.
        window: positions that a row attends to, including its own; 0: all before it.
        chunk: a row attends only to its own chunk of so many positions; 0: there are no chunks.
        sinks: (query heads,) float32, a score of each head that takes part in its softmax and belongs to no key; None:
            there are none.
        alibi: what is added to scores by the positions of keys; None: nothing is.
        tied: values are the keys themselves, and stored once.
        source: the earlier layer whose keys and values its rows attend to; None: its own.
    """

    heads: int
    key_dim: int
    value_dim: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    window: int = 0
    chunk: int = 0
    sinks: Tensor | None = field(default=None, compare=False)
    alibi: Alibi | None = field(default=None, compare=False)
    tied: bool = False
    source: int | None = None

    @property
    def reach(self) -> int:
        """The window as operators of attention are told it, or the chunk as a negative number."""
        return -self.chunk if self.chunk else self.window

    @property
    def plain(self) -> bool:
        """Whether softmax runs over scores of keys alone, of all keys or of those in a window."""
        return not self.chunk and self.sinks is None and self.alibi is None

    def as_json(self) -> list[Any]:
        """All but the device, for a file."""
        known = {name: getattr(self, name) for name in _STORED}
        known["sinks"] = None if self.sinks is None else self.sinks.tolist()
        known["alibi"] = None if self.alibi is None else [self.alibi.slopes.tolist(), *self.alibi[1:]]
        return [*known.values()]

    @classmethod
    def from_json(cls, about: Sequence[Any]) -> LayerShape:
        """What ``as_json`` gave, on the CPU; in older files the last ones are missing."""
        known = dict(zip(_STORED, about, strict=False))
        if known.get("sinks") is not None:
            known["sinks"] = torch.tensor(known["sinks"])
        if (alibi := known.get("alibi")) is not None:
            known["alibi"] = Alibi(torch.tensor(alibi[0]), *alibi[1:])
        return cls(**known)

    @property
    def stored(self) -> tuple[str, ...]:
        """Which of keys and values are stored by this layer."""
        return () if self.source is not None else ("keys",) if self.tied else ("keys", "values")

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of a key and of a value."""
        return {"keys": self.key_dim, "values": self.value_dim}

    @property
    def width(self) -> int:
        """Numbers that are stored of one token and head."""
        return sum(self.dims[kind] for kind in self.stored)

    def pair_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in this layer."""
        return self.heads * self.width * itemsize


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
    """The operations that policies, quantized storage and rotations use."""

    @property
    def shapes(self) -> Sequence[LayerShape]:
        """One per attention layer."""

    def lent(self, columns: int) -> AbstractContextManager[int]:
        """A slot with room for so many tokens, for a pass that belongs to no request."""

    def parts(self, layer: int, slot: int) -> Sequence[Part]:
        """A slot's keys and values in one layer, grouped by heads that have dropped equally many pairs."""

    def renew(self) -> None:
        """Have pointers to the storage renewed before the next pass."""
