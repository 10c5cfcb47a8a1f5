"""Reassigns positions after an eviction: keys of the remaining pairs are rotated to their new positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sakiyomi.cache.rotary import Turn
from sakiyomi.cache.slots import SlotCache

__all__ = ["Repositioner"]

Positions = list[list[Tensor]]
"""By layer and head, (n,) int64."""


class Repositioner:
    """Rotates keys of a cache to the positions that they have after an eviction.

    Args:
        cache: whose keys.
        turn: of the model.
    """

    def __init__(self, cache: SlotCache, turn: Turn) -> None:
        self._cache, self._turn = cache, turn

    def positions(self, slot: int, length: int) -> Positions:
        """The position that each column's key was rotated for: of a layer's heads the last ones are the same."""
        end = length - self._cache.least(slot)
        found: Positions = []
        for layer in range(len(self._cache.shapes)):
            heads: list[Tensor] = []
            for part in self._cache.parts(layer, slot):
                own = torch.arange(end - length + part.dropped, end, device=part.keys.device)
                heads += [own] * (part.heads.stop - part.heads.start)
            found.append(heads)
        return found

    def move(self, slot: int, length: int, kept: Sequence[Sequence[Tensor]], before: Positions) -> None:
        """Rotate what is left.

        Args:
            slot: after the eviction.
            length: tokens of its text.
            kept: by layer and head, the columns that stayed.
            before: positions of the columns that they were taken from.
        """
        for layer, new in enumerate(self.positions(slot, length)):
            for part in self._cache.parts(layer, slot):
                heads = range(part.heads.start, part.heads.stop)
                old = torch.stack([before[layer][head].gather(0, kept[layer][head]) for head in heads])
                by = torch.stack([new[head] for head in heads]) - old.to(part.keys.device)
                n = by.shape[1]
                part.keys[:, :n] = self._turn(layer, part.keys[:, :n], by)
