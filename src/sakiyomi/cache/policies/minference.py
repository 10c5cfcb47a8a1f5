"""MInference: heads attend to some columns and diagonals of the prompt (Jiang et al. 2024, arXiv 2407.02490)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.policies.sparse import Chunk, Sparse
from sakiyomi.core.cache_specs import PATTERNS

Pattern = Literal["vertical-slash", "a-shape", "block-sparse", "auto"]
LAST = 64  # rows by which columns and diagonals are judged
FIRST, NEAREST = 30, 100  # columns and diagonals that are always among those chosen, up to half of them


@dataclass(kw_only=True)
class MInference(Sparse):
    """Heads look at few columns of the prompt, and each in its own pattern.

    - "vertical-slash": the columns and the diagonals at which the chunk's last 64 rows look most; the first 30 columns
      and the nearest 100 diagonals are among them, up to half of each. As in the paper's kernel, the rows of a block
      share what any of them looks at, so that a diagonal that stands alone is as wide as the block.
    - "a-shape": the first columns and the nearest diagonals.
    - "block-sparse": blocks of columns, by the product of a block's mean query and their mean key.
    - "auto": for every head and chunk the one of the three that keeps most of what the chunk's last block looks at. The
      paper searches once, on a sample, for what changes a head's output least, and keeps that for all texts; what is
      chosen here depends on the request alone, too, and needs no sample.

    Attributes:
        vertical: columns.
        slash: diagonals. With blocks there are as many columns in them as ``vertical`` and ``slash`` are together.
    """

    name: ClassVar[str] = "minference"
    published: ClassVar[Mapping[str, Any]] = {"pattern": "vertical-slash", "vertical": 1000, "slash": 6096}

    pattern: Pattern = "vertical-slash"
    vertical: int = 256
    slash: int = 64

    def seen(self, chunk: Chunk) -> Iterator[Tensor]:
        """See ``Sparse``."""
        if self.pattern != "auto":
            yield from self._ways(chunk, [self.pattern])[0]
            return
        names = [name for name in PATTERNS if name != "auto"]
        ways = list(zip(*self._ways(chunk, names), strict=True))
        rows = chunk.queries.shape[1]
        looks = chunk.attention((rows - 1) % self.block + 1).sum(1)
        kept = torch.stack([(looks * seen).sum(1) for seen in ways[-1]])
        best = kept.argmax(0)  # of equals the first: vertical-slash
        for block in ways:
            yield torch.stack(block).gather(0, best[None, :, None].expand(1, -1, block[0].shape[1]))[0]

    def _ways(self, chunk: Chunk, names: list[str]) -> list[Iterator[Tensor]]:
        makers = {"vertical-slash": self._best, "a-shape": self._first_and_nearest, "block-sparse": self._blocks}
        return [makers[name](chunk) for name in names]

    def _best(self, chunk: Chunk) -> Iterator[Tensor]:
        looks = chunk.attention(min(LAST, chunk.queries.shape[1]))
        n = looks.shape[2]
        columns, diagonals = looks.sum(1), diagonal_sums(looks)
        columns[:, : min(FIRST, self.vertical // 2)] = torch.inf
        diagonals[:, : min(NEAREST, self.slash // 2)] = torch.inf
        return self._lines(chunk, _largest(columns, min(self.vertical, n)), _largest(diagonals, min(self.slash, n)))

    def _first_and_nearest(self, chunk: Chunk) -> Iterator[Tensor]:
        column = torch.arange(chunk.keys.shape[1], device=chunk.keys.device).expand(len(chunk.queries), -1)
        return self._lines(chunk, column < self.vertical, column < self.slash)

    def _lines(self, chunk: Chunk, columns: Tensor, diagonals: Tensor) -> Iterator[Tensor]:
        """Columns (H, n), and diagonals by their distance (H, n), for the rows of each block."""
        n = chunk.keys.shape[1]
        # How many diagonals are nearer than each distance, the largest distance first: place n - d.
        nearer = F.pad(diagonals.cumsum(1, dtype=torch.int32), (1, 0)).flip(1)
        for start in range(0, chunk.queries.shape[1], self.block):
            first = chunk.first + start
            end = min(first + self.block, n)
            # A column lies on the diagonals from that of the first row, or its own, to that of the last row: those
            # nearer than its distance to the row behind the block, but not nearer than its distance to the first.
            met = nearer[:, n - end : n] > F.pad(nearer[:, n - first : n], (0, end - first))
            yield columns[:, :end] | met

    def _blocks(self, chunk: Chunk) -> Iterator[Tensor]:
        shared, n, _ = chunk.keys.shape
        means = _means(chunk.keys, self.block)
        queries = _means(chunk.queries, self.block)
        scores = (queries.unflatten(0, (shared, -1)) @ means[:, None].transpose(2, 3)).flatten(0, 1)
        count = -(-(self.vertical + self.slash) // self.block)
        for i in range(scores.shape[1]):
            end = min(chunk.first + (i + 1) * self.block, n)
            own = scores[:, i, : -(-end // self.block)]
            chosen = _largest(own, min(count, own.shape[1]))
            yield chosen.repeat_interleave(self.block, 1)[:, :end]


def _largest(values: Tensor, count: int) -> Tensor:
    """Which are the largest of each line."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, values.topk(count, 1).indices, True)


def _means(rows: Tensor, block: int) -> Tensor:
    """(H, n, dim) to the means of blocks, (H, ceil(n / block), dim) float32; of the last one of what it has."""
    n = rows.shape[1]
    sums: Tensor = F.pad(rows.float(), (0, 0, 0, -n % block)).unflatten(1, (-1, block)).sum(2)
    counts = torch.full((sums.shape[1], 1), float(block), device=rows.device)
    counts[-1] -= -n % block
    return sums.div_(counts)


def diagonal_sums(looks: Tensor) -> Tensor:
    """Attention of the last rows, (H, count, n), by how far back they look: (H, n), 0 for a row's own column."""
    heads, count, n = looks.shape
    padded = F.pad(looks, (count, 0))
    # From line to line a diagonal is one place further right; the last one looks back from place n + count - 1.
    lines = padded.as_strided((heads, count, n), (count * (n + count), n + count + 1, 1), 1)
    return lines.sum(1).flip(1)
