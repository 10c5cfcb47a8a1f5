"""What one pass of the model looks like: which rows belong to which request, and what each row may see.

All requests' new tokens are the rows of one `[1, N]` input. `SequenceRows` are the rows of one request: row 0
of a decoding segment is its last committed token, the others are the nodes of its token tree; the rows of a prefill
segment are a chain. The plan knows no model and no tensors of the cache.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one request in a pass.

    Attributes:
        slot: the request's place in the cache.
        length: KV pairs that the slot holds before the pass.
        tokens: one token id per row.
        parents: for each row the row (of this segment) it follows, -1 for the first; None means a chain.
        prompt: a chunk of a prompt. Such rows may be computed together, by another kernel than the rows of a decoding
            pass.
        done: so many of the pairs in the slot, the last ones, are rows of the same tree from passes before. Rows are
            then counted from the first of those, and ``parents`` begins with theirs.
        block: every row sees all rows of the segment, those behind it too; there are no parents and no windows then.
    """

    slot: int
    length: int
    tokens: Sequence[int]
    parents: tuple[int, ...] | None = None
    prompt: bool = False
    done: int = 0
    block: bool = False


@functools.lru_cache(maxsize=512)
def _paths(parents: tuple[int, ...]) -> tuple[Ints, ...]:
    """Of each row the rows from its tree's root down to itself."""
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append(([] if parent < 0 else paths[parent]) + [i])
    return tuple(np.array(path, np.int64) for path in paths)


def _depths(parents: tuple[int, ...], done: int) -> list[int]:
    """Rows on the way to each row but the first ``done``, itself included."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths[done:]


@functools.lru_cache(maxsize=512)
def _family(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(rows, rows) bool, which rows of its tree each row sees, and (rows,) how deep it lies, 0 for a root."""
    paths = _paths(parents)
    own = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i, path in enumerate(paths):
        own[i, torch.from_numpy(path)] = True
    return own, torch.tensor([len(path) - 1 for path in paths])


def sees(rows: Tensor | int, columns: Tensor, window: int) -> Tensor:
    """Whether rows at these positions see those columns: positions up to their own, within their window.

    Args:
        rows, columns: positions.
        window: see ``BatchPlan.visible``.
    """
    seen = columns <= rows
    if window:
        seen &= columns > rows - window if window > 0 else columns >= rows // -window * -window
    return seen


class BatchPlan:
    """A pass: segments laid out one after the other.

    Args:
        parts: of different slots.

    Attributes:
        rows: how many there are.
        tokens: token id of each row.
        positions: absolute position of each row.
        table: of each segment: slot, first row, rows, length, prompt.
        prompts: a chunk of a prompt is among the segments.
    """

    def __init__(self, parts: Sequence[SequenceRows]) -> None:
        self.parts, self.rows, self.prompts = parts, 0, False
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.table: list[tuple[int, int, int, int, int]] = []
        for part in parts:
            tokens, length, count = part.tokens, part.length, len(part.tokens)
            self.table.append((part.slot, self.rows, count, length, part.prompt))
            self.rows += count
            self.prompts |= part.prompt
            self.tokens += tokens
            if part.parents is None:
                self.positions += range(length, length + count)
            else:
                first = length - part.done - 1
                self.positions += [first + depth for depth in _depths(part.parents, part.done)]

    @property
    def packed(self) -> bytes:
        """For the compiled kernels, in int32: the table with ``done``, then each row's parent.

        That is -1 for none, and -2 where all rows of the segment see each other.
        """
        numbers: list[int] = []
        for line, part in zip(self.table, self.parts, strict=True):
            numbers += (*line, part.done)
        for part in self.parts:
            count = len(part.tokens)
            numbers += [-2] * count if part.block else range(-1, count - 1) if part.parents is None else part.parents
        return struct.pack(f"{len(numbers)}i", *numbers)

    def path(self, segment: int, row: int) -> Ints:
        """Columns of a row of the pass and of those above it in its tree, the row itself last; of a block all of them.

        Args:
            segment: index of the segment.
            row: counted from the first of this pass.
        """
        part = self.parts[segment]
        if part.parents is None:
            return np.arange(part.length, part.length + (len(part.tokens) if part.block else row + 1))
        return part.length - part.done + _paths(part.parents)[part.done + row]

    def visible(self, segment: int, window: int = 0, device: torch.device | str = "cpu", *, dropped: int = 0) -> Tensor:
        """Which columns of its slot each row of a segment sees.

        Args:
            segment: index of the segment.
            window: sliding window in positions (a row sees itself and the `window - 1` positions before it); 0 for
                none; a negative number: chunks of so many positions, of which a row sees its own.
            device: of the result.
            dropped: pairs that are not there any more; what is left of them counts as one position each.

        Returns:
            (rows, columns) bool, columns being length + rows less those dropped; the last ones hold the rows of this
            pass.
        """
        _, _, rows, length, _ = self.table[segment]
        length -= dropped
        part = self.parts[segment]
        column = torch.arange(length + rows, device=device)
        if part.block:
            return torch.ones(rows, length + rows, dtype=torch.bool, device=device)
        if part.parents is None:
            return sees(column[length:, None], column, window)
        own, depth = (tensor.to(device) for tensor in _family(part.parents))
        before = length - part.done
        seen = torch.cat([own.new_ones(rows, before), own[part.done :]], 1)
        if window:
            position = torch.cat([column[:before], before + depth])  # of siblings the same
            seen &= sees(before + depth[part.done :, None], position, window)
        return seen

    def column_positions(self, segment: int, device: torch.device | str = "cpu") -> Tensor:
        """The position of each column of ``visible``, (columns,) int64, of siblings the same."""
        _, _, rows, length, _ = self.table[segment]
        part = self.parts[segment]
        position = torch.arange(length + rows, device=device)
        if part.parents is not None:
            before = length - part.done
            position[before:] = before + _family(part.parents)[1].to(device)
        return position

    def distances(self, segment: int, device: torch.device | str = "cpu") -> Tensor:
        """How many places before each row of a segment each column lies, as positions count: (rows, columns) int64.

        Columns are those of ``visible``; what a row does not see has any number that is not negative.
        """
        length = self.parts[segment].length
        position = self.column_positions(segment, device)
        return (position[length:, None] - position).clamp_min_(0)
