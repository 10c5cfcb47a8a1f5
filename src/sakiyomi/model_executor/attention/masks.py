"""How far a mask lets rows see, read from the mask functions of transformers' classes.

A class may have its window in the mask alone, and tell the attention function nothing of it. A mask function says of
two positions whether one sees the other; it is asked about some rows that lie far behind, and must answer as one of the
kinds that are known here: all positions before a row, a sliding window, or chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FAR = (1 << 18) + 7
"""The row that is asked first; larger windows count as none."""


class Reach(NamedTuple):
    """Positions of a sliding window, and of a chunk; 0: there are none."""

    window: int = 0
    chunk: int = 0

    def sees(self, row: int, columns: Tensor) -> Tensor:
        """Which of these positions a row sees."""
        seen = columns <= row
        if self.window:
            seen = seen & (columns > row - self.window)
        if self.chunk:
            seen = seen & (columns >= row // self.chunk * self.chunk)
        return seen


def reach_of(function: Callable[..., Any]) -> Reach | None:
    """The kind of a mask; None: it is of another kind.

    Args:
        function: from batch, head, row and column, each a tensor, to whether the row sees the column.
    """
    zero = torch.tensor(0)

    @functools.cache  # a far row is long
    def seen(row: int) -> Tensor:
        found: Tensor = torch.as_tensor(function(zero, zero, torch.tensor(row), torch.arange(row + 2)))
        return found.expand(row + 2)

    def first(row: int) -> int:
        columns = seen(row)
        if not columns.any():
            raise IndexError
        return int(columns.byte().argmax())

    try:
        end = first(FAR)
        size = end - first(end - 1) if end else 0
        rows = sorted({FAR, FAR - 1, max(end - 1, 0), end, 2 * size, size, 3})
        for kind in (Reach(), Reach(window=size), Reach(chunk=size)):
            if all(torch.equal(seen(row), kind.sees(row, torch.arange(row + 2))) for row in rows):
                return kind
    except (IndexError, RuntimeError, TypeError, ValueError):  # it looks up what belongs to a text
        pass
    return None
