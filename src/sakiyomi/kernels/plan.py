"""What one pass of the model looks like: which rows belong to which request, and what each row may see.

All requests' new tokens are the rows of one `[1, N]` input. A `Segment` is the stretch of rows of one request: row 0
of a decoding segment is its last committed token, the others are the nodes of its token tree; the rows of a prefill
segment are a chain. The plan knows no model and no tensors of the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one request in a pass.

    Attributes:
        slot: the request's place in the cache.
        length: KV pairs that the slot holds before the pass.
        tokens: one token id per row.
        parents: for each row the row (of this segment) it follows, -1 for the first; None means a chain.
        prompt: a chunk of a prompt. Such rows may be computed together, by another kernel than the rows of a decoding
            pass.
    """

    slot: int
    length: int
    tokens: Sequence[int]
    parents: tuple[int, ...] | None = None
    prompt: bool = False


@functools.lru_cache(maxsize=512)
def _shape(parents: tuple[int, ...] | int) -> tuple[Ints, Ints, tuple[int, ...]]:
    """Starts and rows of every row's path, and depths; from parents or a chain's length."""
    if isinstance(parents, int):
        starts = np.cumsum(np.arange(parents + 1), dtype=np.int32)
        paths = np.concatenate([np.arange(i + 1, dtype=np.int32) for i in range(parents)])
        return starts, paths, tuple(range(parents))
    rows: list[list[int]] = []
    for i, parent in enumerate(parents):
        rows.append(([] if parent < 0 else rows[parent]) + [i])
    starts = np.cumsum([0] + [len(path) for path in rows], dtype=np.int32)
    return starts, np.concatenate([np.asarray(p, np.int32) for p in rows]), tuple(len(p) - 1 for p in rows)


def _joined(parts: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Starts and paths of several segments, the starts counted on."""
    starts: list[Ints] = []
    offset = 0
    for start, path in parts:
        starts.append(start[:-1] + np.int32(offset))
        offset += len(path)
    paths = [path for _, path in parts] or [np.zeros(0, np.int32)]
    return np.concatenate([*starts, np.array([offset], np.int32)]), np.concatenate(paths)


@dataclass(frozen=True, slots=True)
class Plan:
    """Arrays of a pass, ready for the attention operator.

    Attributes:
        segments: (count, 5) int32: slot, first row, rows, length, prompt.
        starts: (rows + 1,) int32, where each row's path begins in `paths`.
        paths: rows of the own segment, counted from its first, from the root down to the row itself.
        positions: absolute position of each row.
        tokens: token id of each row.
    """

    segments: Ints
    starts: Ints
    paths: Ints
    positions: list[int]
    tokens: list[int]

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return len(self.tokens)

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Plan:
        """Lay the segments out one after the other."""
        table: list[tuple[int, ...]] = []
        parts: list[tuple[Ints, Ints]] = []
        positions: list[int] = []
        tokens: list[int] = []
        for segment in segments:
            count, length = len(segment.tokens), segment.length
            starts, paths, depths = _shape(count if segment.parents is None else segment.parents)
            table.append((segment.slot, len(tokens), count, length, segment.prompt))
            parts.append((starts, paths))
            positions.extend([length + depth for depth in depths])
            tokens.extend(segment.tokens)
        starts, paths = parts[0] if len(parts) == 1 else _joined(parts)
        return cls(np.array(table, np.int32).reshape(-1, 5), starts, paths, positions, tokens)

    def visible(self, segment: int, window: int = 0) -> Tensor:
        """Which columns of its slot each row of a segment sees.

        Args:
            segment: index of the segment.
            window: sliding window in positions (a row sees itself and the `window - 1` positions before it); 0 for
                none.

        Returns:
            (rows, length + rows) bool; column `length + i` holds row i.
        """
        _, first, rows, length, _ = (int(x) for x in self.segments[segment])
        seen = torch.zeros(rows, length + rows, dtype=torch.bool)
        seen[:, :length] = True
        for i in range(rows):
            path = self.paths[self.starts[first + i] : self.starts[first + i + 1]]
            if window:
                oldest = length + len(path) - window
                seen[i, : max(0, min(oldest, length))] = False
                path = path[max(0, oldest - length) :]
            seen[i, length + torch.from_numpy(path.astype(np.int64))] = True
        return seen
