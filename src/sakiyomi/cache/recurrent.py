"""States that advance token by token: convolution windows, linear attention, state-space models.

A site is one call of a state function in a model's forward, such as the scan of one layer. Its state after a token
depends only on the state after the token's parent and on the token's own rows (``Recurrence``). Every row of a token
tree therefore starts from its parent's state, and numbers do not depend on the rest of the pass.

For each slot a site holds the state at a length of committed tokens and the rows of the tokens behind it. Rows of
committed tokens are folded into the state when the next pass begins; of the last pass one path is kept. Operations on
slots are decided for all sites together, in ``recurrent_store.py``.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sakiyomi.kernels.batch import BatchPlan


class Around(IntFlag):
    """What transformers' functions do around the recurrence itself, as the compiled kernels know it (recurrent.h).

    Attributes:
        SILU_AFTER: outputs are rounded to their type, and then SiLU of them.
        UNIT_LENGTH, DIVIDED: keys and queries have length 1; by a division, not by an inverse.
        SOFTPLUS_STEPS: steps are softplus of what is given.
        AS_SCAN: rows are those of Mamba-2's scan, whose outputs are float32.
    """

    SILU_AFTER, UNIT_LENGTH, DIVIDED, SOFTPLUS_STEPS, AS_SCAN = 1, 2, 4, 8, 16


class Recurrence(ABC):
    """One kind of state. Tensors of rows have the row first, states too; all are float32.

    Attributes:
        kept: so many of the rows' tensors, the first ones, are all that ``advance`` reads.
        kernel: number of the kind in the compiled kernels.
    """

    kept: ClassVar[int] = 1
    kernel: ClassVar[int]

    def kernel_shape(self, site: Site) -> tuple[int, int, int, int]:
        """Heads, groups of keys, width of keys and of values of a state, as the compiled kernels count them."""
        return 1, 1, math.prod(site.state[:-1]), site.state[-1]

    @abstractmethod
    def shape(self, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[int, ...]:
        """Of the state of one text, by what is given for (1, N, ...) rows."""

    def prepare(self, rows: Sequence[Tensor], fixed: Sequence[Tensor], around: int) -> list[Tensor]:
        """What is computed with, (N, ...) each, out of what is given, (1, N, ...), each of the same size."""
        return [tensor[0].float() for tensor in rows]

    def finish(self, out: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor], around: int) -> Tensor:
        """Outputs (N, ...), as they are given back, (1, N, ...)."""
        rounded = out.to(rows[0].dtype)[None]
        return nn.functional.silu(rounded) if around & Around.SILU_AFTER else rounded

    def keep(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of each row what ``advance`` reads, by the states after its parent."""
        return rows[: self.kept]

    @abstractmethod
    def advance(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """The states after each row, from those after its parent, by what is kept of it."""

    @abstractmethod
    def read(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """The output of each row, shaped like the first of its tensors, from the state after it."""

    def chain(self, state: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs of rows that follow each other, and the state after the last of them."""
        outputs, states = [], state[None]
        for i in range(len(rows[0])):
            row = [tensor[i : i + 1] for tensor in rows]
            states = self.advance(states, self.keep(states, row, fixed), fixed)
            outputs.append(self.read(states, row, fixed))
        return torch.cat(outputs), states[0]


@dataclass
class Site:
    """A call of a state function, learnt from the first pass.

    Attributes:
        kind: what it computes.
        rows: shapes of one row of each of its tensors.
        state: shape of the state of one text.
        device: where they are.
        compiled: the compiled kernels run it.
        around: see ``Around``.
    """

    kind: Recurrence
    rows: tuple[tuple[int, ...], ...] = ()
    state: tuple[int, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compiled: bool = False
    around: int = 0

    def learn(self, rows: Sequence[Tensor], fixed: Sequence[Tensor], around: int = 0) -> None:
        """Note the shapes of a call, whose rows are (1, N, ...)."""
        if not self.state:
            self.around = int(around)
            self.rows = tuple(tuple(map(int, tensor.shape[2:])) for tensor in rows)
            self.state = tuple(map(int, self.kind.shape(rows, fixed)))
            self.device = rows[0].device

    def whole(self, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """The outputs of rows that are a whole text."""
        state = torch.zeros(self.state, device=self.device)
        out, _ = self.kind.chain(state, self.kind.prepare(rows, fixed, self.around), fixed)
        return self.kind.finish(out, rows, fixed, self.around)

    @property
    def kept(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what is kept of a row."""
        return self.rows[: self.kind.kept]

    @property
    def width(self) -> int:
        """Numbers that are kept of a row."""
        return sum(map(math.prod, self.kept))


@functools.lru_cache(maxsize=512)
def _levels(parents: tuple[int, ...]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Of each level of a tree its rows, and their parents counted from 1, 0 for what the tree hangs from."""
    levels: list[tuple[list[int], list[int]]] = []
    depth: list[int] = []
    for row, parent in enumerate(parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        if depth[row] == len(levels):
            levels.append(([], []))
        levels[depth[row]][0].append(row)
        levels[depth[row]][1].append(parent + 1)
    return tuple((torch.tensor(rows), torch.tensor(above)) for rows, above in levels)


class SiteState:
    """The states of one site by slot: see ``ModuleState``.

    Attributes:
        states: (slots, *shape) float32.
        rows: (slots, room, width) float32, what is kept of tokens from the slot's first on.
        at: (slots,) int64, of each slot the tokens that are folded into its state.
        copies: of each slot copies of the state by length.

    Args:
        site: which.
        first: (slots,) int64, of each slot the token of the first row that is kept.
    """

    def __init__(self, site: Site, first: NDArray[np.int64]) -> None:
        self.site, self._first = site, first
        self.states = torch.zeros(0, *site.state, device=site.device)
        self.rows = torch.zeros(0, 0, site.width, device=site.device)
        self.at = np.zeros_like(first)
        self.copies: list[dict[int, Tensor]] = [{} for _ in first]

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        return self.states.nbytes + self.rows.nbytes + sum(c.nbytes for of in self.copies for c in of.values())

    def grow(self, slots: int, room: int) -> None:
        """Storage for so many slots and rows of each, with the same contents."""
        states = torch.zeros(slots, *self.site.state, device=self.site.device)
        rows = torch.zeros(slots, room, self.site.width, device=self.site.device)
        states[: len(self.states)] = self.states
        rows[: len(self.rows), : self.rows.shape[1]] = self.rows
        self.states, self.rows = states, rows

    def set(self, slot: int, length: int) -> None:
        """Have the state be the copy of this length; zeros at the beginning of a text."""
        self.states[slot] = self.copies[slot][length] if length else 0.0
        self.at[slot] = length

    def fold(self, slot: int, length: int) -> Tensor:
        """The state at so many tokens, of which there are rows."""
        if self.at[slot] < length:
            first = self._first[slot]
            rows = self._split(self.rows[slot, self.at[slot] - first : length - first])
            states = self.states[slot][None]
            for i in range(len(rows[0])):
                states = self.site.kind.advance(states, [tensor[i : i + 1] for tensor in rows], self._fixed)
            self.states[slot] = states[0]
            self.at[slot] = length
        return self.states[slot]

    def _split(self, kept: Tensor) -> list[Tensor]:
        """What is kept of rows, (rows, width), tensor by tensor."""
        parts = kept.split([math.prod(shape) for shape in self.site.kept], 1)
        return [part.view(len(kept), *shape) for part, shape in zip(parts, self.site.kept, strict=True)]

    _fixed: Sequence[Tensor] = ()

    def forward(self, rows: Sequence[Tensor], fixed: Sequence[Tensor], plan: BatchPlan) -> Tensor:
        """The outputs of the rows of a pass, shaped like the first tensor.

        Args:
            rows: (1, N, ...) each; those beyond ``plan.rows`` fill the pass up.
            fixed: what is the same for all rows: weights.
            plan: of the pass.
        """
        self._fixed = fixed
        kind, around = self.site.kind, self.site.around
        wide = kind.prepare(rows, fixed, around)
        out = torch.zeros_like(wide[0])
        for part, (slot, first, count, length, prompt) in zip(plan.parts, plan.table, strict=True):
            here = slice(first, first + count)
            own = [tensor[here] for tensor in wide]
            state = self.fold(slot, length - part.done)
            if prompt:
                out[here], self.states[slot] = kind.chain(state, own, fixed)
                self.at[slot] = length + count
                continue
            begin = length - int(self._first[slot])
            kept = self.rows[slot, begin - part.done : begin + count]
            states = state.new_empty(1 + part.done + count, *state.shape)
            states[0] = state
            chain = tuple(range(-1, part.done + count - 1))
            for nodes, above in _levels(chain if part.parents is None else part.parents):
                new = nodes >= part.done
                rows_of_level = [tensor[nodes[new] - part.done] for tensor in own]
                found = kind.keep(states[above[new]], rows_of_level, fixed)
                kept[nodes[new]] = torch.cat([tensor.flatten(1) for tensor in found], 1)
                states[nodes + 1] = kind.advance(states[above], self._split(kept[nodes]), fixed)
            out[here] = kind.read(states[1 + part.done :], own, fixed)
        return kind.finish(out, rows, fixed, around)
