"""Sizes of a cache's storage: bytes, growth by doubling, and errors when memory is short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.mapped_files import MappedFiles
from sakiyomi.cache.quantized import GROUP, QuantizedKV
from sakiyomi.core.errors import MemoryLimitError

FIRST_ROOM = 256
STEP = 64  # columns, where doubling does not fit


class Size(NamedTuple):
    """Slots, columns of the largest heads in full precision, and quantized columns of the largest layers."""

    slots: int
    room: int
    packed: int


@dataclass
class Sizing:
    """Sizes of the storage of one cache.

    Attributes:
        shapes: one per attention layer. Where pairs may be dropped, each layer drops others, and stores its own.
        dtype: of the stored tensors.
        max_slots: slots at most, those that no request is given included.
        spare: columns at the end of every slot that no token ever takes.
        limits: of each layer the columns that each head ever has at once; None: any number.
        packed: where quantized columns lie; None: none are.
        available: returns the bytes that may still be allocated; None: no limit is known.
        offloaded: where the tensors' files lie; None: they are in memory.
    """

    shapes: tuple[LayerShape, ...]
    dtype: torch.dtype
    max_slots: int
    spare: int = 0
    limits: Sequence[Sequence[int]] | None = None
    packed: QuantizedKV | None = None
    available: Callable[[], int] | None = None
    offloaded: MappedFiles | None = None

    def __post_init__(self) -> None:
        if self.limits is not None:
            self.shapes = tuple(replace(shape, tied=False, source=None) for shape in self.shapes)

    @property
    def most(self) -> int | None:
        """Columns that the largest head ever has at once; None: any number."""
        return None if self.limits is None else max(map(max, self.limits))

    @property
    def pair_bytes(self) -> int:
        """Bytes that one token of one request takes over all layers."""
        return sum(shape.pair_bytes(self.dtype.itemsize) for shape in self.shapes)

    def rooms(self, room: int) -> list[list[int]]:
        """Columns of each layer's heads, where the largest have so many."""
        if self.limits is None:
            return [[room] * shape.heads for shape in self.shapes]
        return [[min(room, limit + self.spare) for limit in limits] for limits in self.limits]

    def bytes(self, size: Size) -> int:
        """Bytes of so large a storage."""
        numbers = 0
        for shape, rooms in zip(self.shapes, self.rooms(size.room), strict=True):
            numbers += sum(rooms) * shape.width
        quantized = self.packed.bytes(size.slots, size.packed) if self.packed is not None else 0
        return size.slots * numbers * self.dtype.itemsize + quantized

    def packed_columns(self, columns: int) -> int:
        """Quantized columns that a text of so many columns may come to."""
        return self.packed.wanted(columns) if self.packed is not None else 0

    def holds(self, present: Size, slots: int, columns: int, packed: int) -> bool:
        """Whether the present storage is enough."""
        return slots <= present.slots and columns + self.spare <= present.room and packed <= present.packed

    def grown(self, present: Size, slots: int, columns: int, packed: int) -> Size:
        """Storage for so many slots of so many columns: doubled, or, if that is too much, what is needed.

        Raises:
            MemoryLimitError: not even that fits.
        """
        doubled = Size(
            self._doubled(max(present.slots, 1), slots, self.max_slots),
            self._doubled(max(present.room, FIRST_ROOM), columns + self.spare),
            present.packed if packed <= present.packed else self._doubled(max(2 * present.packed, FIRST_ROOM), packed),
        )
        if self.available is None:
            return doubled
        left = self.available()
        if self.bytes(doubled) <= left:
            return doubled
        room = max(present.room, FIRST_ROOM, -(-(columns + self.spare) // STEP) * STEP)
        least = Size(max(present.slots, slots), room, max(present.packed, packed))
        if (need := self.bytes(least)) > left:
            pair = self.pair_bytes
            if self.packed is not None:
                pair = max(1, (self.packed.bytes(1, 2 * GROUP) - self.packed.bytes(1, GROUP)) // GROUP)
            where = "" if self.offloaded is None else f" in {self.offloaded.folder}"
            raise MemoryLimitError(
                f"the KV cache needs {need:,} bytes for {least.slots} requests of {room + least.packed} tokens, "
                f"{left:,} are available{where}; about {left // (pair * least.slots)} tokens a request fit: shorten "
                "the prompt or lower max_new_tokens or max_batch"
            )
        return least

    @staticmethod
    def _doubled(now: int, wanted: int, most: int | None = None) -> int:
        while now < wanted:
            now = 2 * now if most is None else min(2 * now, most)
        return now
