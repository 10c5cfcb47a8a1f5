"""The plan of one pass: which rows belong to which request, and which columns each row sees.

The new tokens of all requests are the rows of one `[1, N]` input. `SequenceRows` are the rows of one request. Row 0 of
a decoding segment is the request's last committed token, the others are the nodes of its token tree; the rows of a
prefill segment are a chain. A plan does not depend on the model, or on the tensors of the cache.
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
        slot: the request's slot in the cache.
        length: number of KV pairs in the slot before the pass.
        tokens: one token id per row.
        parents: for each row the row (of this segment) it follows, -1 for the first; None means a chain.
        prompt: a chunk of a prompt. Another kernel than that of decoding rows may compute such rows together.
        done: number of the last pairs in the slot that are rows of the same tree from earlier passes. Rows are then
            counted from the first of these, and ``parents`` begins with theirs.
        block: every row sees all rows of the segment, also later ones; parents and windows do not apply.
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
    """For each row: the rows from the root of its tree down to itself."""
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append(([] if parent < 0 else paths[parent]) + [i])
    return tuple(np.array(path, np.int64) for path in paths)


def _depths(parents: tuple[int, ...], done: int) -> list[int]:
    """For each row but the first ``done``: the number of rows on its path, itself included."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths[done:]


@functools.lru_cache(maxsize=512)
def _family(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(rows, rows) bool: the rows of its tree that each row sees; and (rows,): its depth, 0 for a root."""
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
        rows: number of rows.
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
        """The plan in int32 for the compiled kernels: the table with ``done``, then each row's parent.

        The parent is -1 for none, and -2 if all rows of the segment see each other.
        """
        numbers: list[int] = []
        for line, part in zip(self.table, self.parts, strict=True):
            numbers += (*line, part.done)
        for part in self.parts:
            count = len(part.tokens)
            numbers += [-2] * count if part.block else range(-1, count - 1) if part.parents is None else part.parents
        return struct.pack(f"{len(numbers)}i", *numbers)

    def path(self, segment: int, row: int) -> Ints:
        """Columns of a row of the pass and of its ancestors, the row itself last; of a block all columns of its rows.

        Args:
            segment: index of the segment.
            row: counted from the first of this pass.
        """
        part = self.parts[segment]
        if part.parents is None:
            return np.arange(part.length, part.length + (len(part.tokens) if part.block else row + 1))
        return part.length - part.done + _paths(part.parents)[part.done + row]

    def visible(self, segment: int, window: int = 0, device: torch.device | str = "cpu", *, dropped: int = 0) -> Tensor:
        """The columns of its slot that each row of a segment sees.

        Args:
            segment: index of the segment.
            window: sliding window in positions (a row sees itself and the `window - 1` positions before it); 0: none; a
                negative number: chunks of so many positions, of which a row sees its own.
            device: of the result.
            dropped: number of dropped pairs; the remaining pairs count as one position each.

        Returns:
            (rows, columns) bool with length + rows - dropped columns; the last ones are the rows of this pass.
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
            position = torch.cat([column[:before], before + depth])  # siblings have the same
            seen &= sees(before + depth[part.done :, None], position, window)
        return seen

    def column_positions(self, segment: int, device: torch.device | str = "cpu") -> Tensor:
        """The position of each column of ``visible``, (columns,) int64; siblings have the same position."""
        _, _, rows, length, _ = self.table[segment]
        part = self.parts[segment]
        position = torch.arange(length + rows, device=device)
        if part.parents is not None:
            before = length - part.done
            position[before:] = before + _family(part.parents)[1].to(device)
        return position

    def distances(self, segment: int, device: torch.device | str = "cpu") -> Tensor:
        """The distance in positions of each column before each row of a segment: (rows, columns) int64.

        The columns are those of ``visible``. For columns that a row does not see the distance is any number from 0 on.
        """
        length = self.parts[segment].length
        position = self.column_positions(segment, device)
        return (position[length:, None] - position).clamp_min_(0)
