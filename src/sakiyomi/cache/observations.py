"""Observations of the rows of passes for the cache's policy, by slot, from one boundary to the next.

Rows of a tree that is rejected later are written like all others, and removed together with their tokens' pairs. At an
eviction boundary only rows of committed tokens are read, in the order of their places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sakiyomi.kernels.batch import BatchPlan

STEP = 64  # rows


class RowObservations:
    """Rows of numbers by layer and slot, (slots, rows, width) each.

    Args:
        layers: of the model.
        slots: of the cache.
    """

    def __init__(self, layers: int, slots: int) -> None:
        self._slots = slots
        self._rows: list[Tensor | None] = [None] * layers
        self._since: list[int | None] = [None] * slots

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        return sum(rows.nbytes for rows in self._rows if rows is not None)

    def begin(self, slot: int, length: int) -> None:
        """Forget the rows of a slot; rows of tokens from place `length` on come next."""
        self._since[slot] = length

    def end(self, slot: int) -> None:
        """The slot is free: rows of passes over it are not stored."""
        self._since[slot] = None

    def write(self, layer: int, plan: BatchPlan, observed: Tensor) -> None:
        """Store the rows of a pass, (rows, width), without those that only fill it up."""
        for slot, first, count, length, _ in plan.table:
            since = self._since[slot]
            if since is None:
                continue
            at, rows = length - since, self._rows[layer]
            if rows is None or at + count > rows.shape[1]:
                room = -(-(at + count) // STEP) * STEP
                fresh = observed.new_zeros(self._slots, room, observed.shape[1])
                if rows is not None:
                    fresh[:, : rows.shape[1]] = rows
                rows = self._rows[layer] = fresh
            rows[slot, at : at + count] = observed[first : first + count]

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """As ``SlotCache.commit``."""
        if all(row == i for i, row in enumerate(rows)):
            return
        since = self._since[slot]
        if since is None:  # its text began before anything was observed
            return
        at = length - since
        source = torch.tensor([at + row for row in rows])
        for stored in self._rows:
            if stored is not None:
                stored[slot, at : at + len(rows)] = stored[slot].index_select(0, source.to(stored.device))

    def read(self, layer: int, slot: int, length: int) -> Tensor | None:
        """The rows of tokens since ``begin``, up to place `length`, (rows, width); None: nothing was observed."""
        rows, since = self._rows[layer], self._since[slot]
        return None if rows is None or since is None else rows[slot, : length - since]
