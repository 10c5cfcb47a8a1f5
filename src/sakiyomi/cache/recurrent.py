"""States that go on from token to token: convolution windows, linear attention, state-space models.

A site is one call of a state function in a model's forward, such as the scan of one layer. Its state after a token
follows from the state after the token's parent and from the token's own rows alone (``Recurrence``). So every row of a
token tree starts from its parent's state, and numbers do not depend on what else is in a pass.

Of each slot a site holds the state at a length of committed tokens, and the rows of the tokens behind it: committed
ones that are folded into the state when the next pass begins, and those of the last pass, of which a path is kept. What
happens to slots is decided for all sites at once, in ``recurrent_store.py``.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sakiyomi.kernels.batch import BatchPlan

__all__ = ["Recurrence", "Site", "SiteState"]


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
        """Of the state of one text."""

    @abstractmethod
    def advance(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """The states after each row, from those after its parent."""

    @abstractmethod
    def read(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """The output of each row, shaped like the first of its tensors, from the state after it."""

    def chain(self, state: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs of rows that follow each other, and the state after the last of them."""
        outputs, states = [], state[None]
        for i in range(len(rows[0])):
            row = [tensor[i : i + 1] for tensor in rows]
            states = self.advance(states, row[: self.kept], fixed)
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
    """

    kind: Recurrence
    rows: tuple[tuple[int, ...], ...] = ()
    state: tuple[int, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compiled: bool = False

    def learn(self, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> None:
        """Note the shapes of a call."""
        if not self.state:
            self.rows = tuple(tuple(map(int, tensor.shape[1:])) for tensor in rows)
            self.state = tuple(map(int, self.kind.shape(rows, fixed)))
            self.device = rows[0].device

    def whole(self, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """The outputs of rows that are a whole text."""
        state = torch.zeros(self.state, device=self.device)
        out, _ = self.kind.chain(state, [tensor.float() for tensor in rows], fixed)
        return out.to(rows[0].dtype)

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
            rows: (N, ...) each; those beyond ``plan.rows`` fill the pass up.
            fixed: what is the same for all rows: weights.
            plan: of the pass.
        """
        self._fixed = fixed
        kind = self.site.kind
        wide = [tensor.float() for tensor in rows]
        kept = torch.cat([tensor.flatten(1) for tensor in wide[: kind.kept]], 1)
        out = torch.zeros_like(wide[0])
        for i, (slot, first, count, length, prompt) in enumerate(plan.table):
            here = slice(first, first + count)
            own = [tensor[here] for tensor in wide]
            part = plan.parts[i]
            if prompt:
                out[here], self.states[slot] = kind.chain(self.fold(slot, length - part.done), own, fixed)
                self.at[slot] = length + count
                continue
            begin = length - int(self._first[slot])
            self.rows[slot, begin : begin + count] = kept[here]
            state = self.fold(slot, length - part.done)
            if part.parents is None:
                out[here], _ = kind.chain(state, own, fixed)
                continue
            tree = self._split(self.rows[slot, begin - part.done : begin + count])
            states = state.new_empty(1 + part.done + count, *state.shape)
            states[0] = state
            for nodes, above in _levels(part.parents):
                found = kind.advance(states[above], [tensor[nodes] for tensor in tree], fixed)
                states[nodes + 1] = found
            out[here] = kind.read(states[1 + part.done :], own, fixed)
        return out.to(rows[0].dtype)
