"""The encoder input of a request, and its keys and values for cross-attention, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sakiyomi.cache.slots import SlotCache


@dataclass(frozen=True, eq=False)
class Source:
    """The source of one request. Requests with the same object share its keys and values.

    Attributes:
        inputs: what the encoder is called with, a batch of one.
        length: places that it has for cross-attention.
        tokens: of the source in the decoder's vocabulary, for drafters that look tokens up; empty if the source is no
            text, or has another vocabulary.
        encoded: what encoders made of it, (1, length, width), by their ids: an encoder reads it once.
    """

    inputs: dict[str, Tensor]
    length: int
    tokens: Sequence[int] = ()
    encoded: dict[int, Tensor] = field(default_factory=dict)


class SourceCache(SlotCache):
    """Keys and values of every request's source, in the same slots as its text; one shape per cross-attention layer."""

    @cached_property
    def lengths(self) -> Tensor:
        """(max_slots + extra,) int32 on the CPU: places of each slot's source; 0: none."""
        return torch.zeros(self.max_slots + self.extra, dtype=torch.int32)

    @cached_property
    def _held(self) -> dict[int, Source]:
        return {}

    def holds(self, slot: int, source: Source) -> bool:
        """Whether the slot has the keys and values of this source; they are copied if another slot has them."""
        if self._held.get(slot) is source:
            return True
        other = next((other for other, held in self._held.items() if held is source), None)
        if other is None:
            return False
        count = int(self.lengths[other])
        self.fork(slot, other, 0, count)
        self._finish(slot, source, count)
        return True

    def fill(self, slot: int, source: Source, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Store keys and values; there must be room.

        Args:
            slot: of the request.
            source: that was read.
            pairs: a layer each, keys and values (heads, places, dim).
        """
        self._held.pop(slot, None)
        count = 0
        for store, values, (key, value) in zip(self.keys, self.values, pairs, strict=True):
            count = key.shape[1]
            store[slot, :, :count] = key
            values[slot, :, :count] = value
        self._finish(slot, source, count)

    def _finish(self, slot: int, source: Source, count: int) -> None:
        self.lengths[slot] = count
        self._held[slot] = source
