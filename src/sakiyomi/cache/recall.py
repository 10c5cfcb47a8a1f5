"""All pairs of every slot in main memory, for policies that choose the pairs for attention again at every boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sakiyomi.cache.rotary import Turn
from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.memory import available_bytes


class MainMemory:
    """A copy of all pairs of a cache, at the positions of the whole text.

    Args:
        cache: what attention reads.
        turn: turns keys back, where the cache's positions move; None: they do not.

    Attributes:
        pairs: the copy, in slots of the same numbers.
    """

    def __init__(self, cache: SlotCache, turn: Turn | None) -> None:
        self._cache, self._turn = cache, turn
        shapes = [replace(shape, device=torch.device("cpu")) for shape in cache.shapes]
        self.pairs = SlotCache(shapes, dtype=cache.dtype, max_slots=cache.max_slots, available=available_bytes)

    def store(self, slot: int, first: int, length: int) -> None:
        """Copy the cache's pairs of places [first, length)."""
        self.pairs.reserve(slot, length)
        moved = self._cache.least(slot)
        for layer in range(len(self._cache.shapes)):
            for part in self._cache.parts(layer, slot):
                own = slice(first - part.dropped, length - part.dropped)
                keys = part.keys[:, own]
                if self._turn is not None and moved:
                    keys = self._turn(layer, keys, torch.full(keys.shape[:2], moved, device=keys.device))
                self.pairs.keys[layer][slot, part.heads, first:length] = keys
                self.pairs.values[layer][slot, part.heads, first:length] = part.values[:, own]

    def recall(self, slot: int, length: int, columns: Sequence[Sequence[Tensor]]) -> None:
        """Have the cache hold these columns of the text and nothing else."""
        self._cache.excerpt(slot, length, self.pairs, slot, [torch.stack(list(of_layer)) for of_layer in columns])

    def _stores(self) -> list[tuple[str, Tensor]]:
        """Every tensor by its name in a file."""
        keys = [(f"all_keys.{layer}", store) for layer, store in enumerate(self.pairs.keys)]
        return keys + [(f"all_values.{layer}", store) for layer, store in enumerate(self.pairs.values)]

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """A copy of a slot's first pairs, by name."""
        return {name: store[slot, :, :length].clone() for name, store in self._stores()}

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Take over what ``snapshot`` gave."""
        self.pairs.reserve(slot, length)
        for name, store in self._stores():
            store[slot, :, :length] = known[name]
