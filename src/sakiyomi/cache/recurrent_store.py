"""The recurrent states of a model on one cache: the folded state of each slot, rows behind it, and copies.

A recurrent state cannot be rolled back, so copies are kept. One is a few tokens back: folding rows into it gives any
later length. Others are at the borders of a prompt's chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sakiyomi.cache.recurrent import Site, SiteState
from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.kernels.batch import BatchPlan

TAIL = 16  # tokens between two copies of the state, of which the last two are kept
BORDERS = 4  # copies that are kept at borders of a prompt's chunks
ROOM = 2 * TAIL + 16  # rows of a slot at first


@dataclass
class _Record:
    """What is kept of one slot's text, the same at every site.

    Attributes:
        at: tokens folded into the state, or about to be in the running pass.
        tails: lengths of copies behind which rows are kept, ascending.
        borders: lengths of further copies, ascending.
    """

    at: int = 0
    tails: list[int] = field(default_factory=lambda: [0])
    borders: list[int] = field(default_factory=list)


class SiteKernels(Protocol):
    """What the compiled kernels do for all sites of a store at once."""

    def attach_states(self, store: RecurrentStore) -> None:
        """The store's tensors are new ones."""

    def fold(self, slot: int, length: int) -> None:
        """Fold the rows of a slot's tokens up to this length into its states, where that was not done."""

    def keep_rows(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """See ``RecurrentStore.commit``."""


class RecurrentStore:
    """The states of all sites of a model on one cache: see ``LayerState``.

    Args:
        sites: by number.
        slots: of the cache.
        available: returns the bytes that may still be allocated; None: no limit is known.

    Attributes:
        first: (slots,) int64, of each slot the token of the first row that is kept; a copy of the state lies there, or
            nothing behind it is kept yet.
        kernels: handles all sites in one call of the compiled kernels; None: they do not run.
    """

    def __init__(self, sites: Mapping[int, Site], slots: int, available: Callable[[], int] | None = None) -> None:
        self._records = [_Record() for _ in range(slots)]
        self.first = np.zeros(slots, np.int64)
        self.sites = {number: SiteState(site, self.first) for number, site in sites.items()}
        self._slots, self._room, self._available = 0, ROOM, available
        self.kernels: SiteKernels | None = None

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        return sum(site.bytes for site in self.sites.values())

    def clear(self, slot: int) -> None:
        """A text begins in this slot."""
        self._records[slot], self.first[slot] = _Record(), 0
        for site in self.sites.values():
            site.copies[slot] = {}
            if slot < self._slots:
                site.set(slot, 0)

    def reserve(self, slot: int, columns: int) -> None:
        """Make room for a slot; how many tokens its text has does not matter.

        Raises:
            MemoryLimitError: there is no memory for it; nothing has changed then.
        """
        if slot < self._slots:
            return
        slots = min(len(self._records), max(slot + 1, 2 * self._slots))
        # Beside the state itself come copies of it.
        one = sum(
            (2 + BORDERS) * 4 * math.prod(site.site.state) + 4 * ROOM * site.site.width for site in self.sites.values()
        )
        if self._available is not None and one * (slots - self._slots) > (left := self._available()):
            slots = slot + 1
            if (need := one * (slots - self._slots)) > left:
                raise MemoryLimitError(
                    f"the recurrent states of {slots - self._slots} more requests need {need:,} bytes, and {left:,} "
                    "are available; lower max_batch"
                )
        self._grow(slots, self._room)

    def _grow(self, slots: int, room: int) -> None:
        for site in self.sites.values():
            site.grow(slots, room)
        self._slots, self._room = slots, room
        if self.kernels is not None:
            self.kernels.attach_states(self)

    def begin(self, plan: BatchPlan) -> None:
        """A pass begins: what is committed is folded where a copy is due, and there is room for its rows."""
        for (slot, _, count, length, prompt), part in zip(plan.table, plan.parts, strict=True):
            record, committed = self._records[slot], length - part.done
            if committed < record.at:  # a pass that failed runs again
                self.roll_back(slot, committed)
            if prompt:
                self._border(slot, committed)
                record.tails, record.at, self.first[slot] = [], committed + count, committed + count
                self._forget(slot)
                continue
            if not record.tails:
                self._border(slot, committed)
                record.tails, self.first[slot] = [committed], committed
                self._forget(slot)
            elif committed - record.tails[-1] >= TAIL:
                self._copy(slot, committed)
                record.tails = [*record.tails, committed][-2:]
                self._drop_rows(slot, record.tails[0], length)
                self._forget(slot)
            record.at = committed
            if (room := length + count - int(self.first[slot])) > self._room:
                self._grow(self._slots, max(room, 2 * self._room))

    def _border(self, slot: int, length: int) -> None:
        """Keep a copy at a border, the first one and the last few."""
        self._copy(slot, length)
        borders = self._records[slot].borders
        if length and length not in borders:
            borders.append(length)
            del borders[1 : 1 + len(borders) - BORDERS]

    def _copy(self, slot: int, length: int) -> None:
        """Keep a copy of the state at the length of what is committed."""
        if self.kernels is not None:
            self.kernels.fold(slot, length)
        for site in self.sites.values() if length else ():
            site.copies[slot][length] = site.fold(slot, length).clone()

    def _drop_rows(self, slot: int, first: int, length: int) -> None:
        """Rows before this token are not needed any more."""
        gone = first - int(self.first[slot])
        self.first[slot] = first
        for site in self.sites.values() if gone else ():
            site.rows[slot, : length - first] = site.rows[slot, gone : length - first + gone].clone()

    def _forget(self, slot: int) -> None:
        """Free the copies that are no longer needed."""
        record = self._records[slot]
        for site in self.sites.values():
            site.copies[slot] = {
                at: copy for at, copy in site.copies[slot].items() if at in record.tails or at in record.borders
            }

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Of the pass that wrote rows behind `length` tokens keep these, ascending, and drop the others."""
        if all(row == i for i, row in enumerate(rows)):
            return
        if self.kernels is not None:
            self.kernels.keep_rows(slot, length, rows)
            return
        begin = length - int(self.first[slot])
        chosen = torch.tensor([begin + row for row in rows])
        for site in self.sites.values():
            site.rows[slot, begin : begin + len(rows)] = site.rows[slot, chosen.to(site.rows.device)]

    def resumable(self, slot: int, length: int) -> int:
        """The longest beginning, of at most `length` tokens, behind which a pass can continue."""
        record = self._records[slot]
        if length >= min([record.at, *record.tails[:1]]):
            return length
        return max((at for at in record.borders if at <= length), default=0)

    def roll_back(self, slot: int, length: int) -> None:
        """Forget what lies behind so many tokens, a length that ``resumable`` gave."""
        record = self._records[slot]
        if length < record.at:
            near = [at for at in record.tails if at <= length]
            start = near[-1] if near else length
            if not near:
                record.tails, self.first[slot] = [length], length
            for site in self.sites.values():
                site.set(slot, start)
            record.at = start
        record.tails = [at for at in record.tails if at <= length]
        record.borders = [at for at in record.borders if at <= length]
        self._forget(slot)

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        """Copy from another slot what it holds at `length` tokens, which is resumable there."""
        self.reserve(slot, length)
        mine, theirs = self._records[slot], self._records[other]
        mine.at, mine.tails, mine.borders = theirs.at, list(theirs.tails), list(theirs.borders)
        self.first[slot] = self.first[other]
        for site in self.sites.values():
            site.states[slot], site.rows[slot] = site.states[other], site.rows[other]
            site.at[slot], site.copies[slot] = site.at[other], dict(site.copies[other])  # copies do not change
        self.roll_back(slot, length)

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """A copy on the CPU of the states at so many tokens, by name."""
        self.roll_back(slot, length)
        self._records[slot].at = length
        if self.kernels is not None:
            self.kernels.fold(slot, length)
        return {str(i): site.fold(slot, length).to("cpu", copy=True) for i, site in enumerate(self.sites.values())}

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Fill an empty slot with what ``snapshot`` gave."""
        self.reserve(slot, length)
        self._records[slot], self.first[slot] = _Record(length, [length]), length
        for i, site in enumerate(self.sites.values()):
            site.copies[slot] = {length: known[str(i)].to(site.site.device)}
            site.set(slot, length)
