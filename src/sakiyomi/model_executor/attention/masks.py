"""The window of a mask, read from the mask functions of transformers' classes.

A class may have its window in the mask alone, and not pass it to the attention function. A mask function says of two
positions whether one sees the other. It is called for a few rows at high positions, and must answer as one of three
kinds of masks: all positions before a row, a sliding window, or chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sakiyomi.kernels.batch import sees

FAR = (1 << 18) + 7
"""The row that is asked first; larger windows count as none."""


@functools.cache
def _columns(device: torch.device) -> Tensor:
    """All columns up to twice the largest window, made once: a far row is long."""
    return torch.arange(2 * FAR + 2, device=device)


def window_of(function: Callable[..., Any]) -> int | None:
    """The window of a mask, as ``BatchPlan.visible`` takes it: negative for chunks; None: a mask of another kind.

    Args:
        function: from batch, head, row and column, each a tensor, to whether the row sees the column.
    """
    zero = torch.tensor(0)
    columns = _columns(zero.device)

    @functools.cache
    def seen(row: int) -> Tensor:
        found: Tensor = torch.as_tensor(function(zero, zero, torch.tensor(row), columns[: row + 2]))
        return found.expand(row + 2)

    def first(row: int) -> int:
        found = seen(row)
        if not found.any():
            raise IndexError
        return int(found.byte().argmax())

    try:
        end = first(FAR)
        for window in (0, FAR + 1 - end, first(end - 1) - end if end else 0):
            size = abs(window)
            rows = sorted({FAR, FAR - 1, max(end - 1, 0), end, 2 * size, size, 3})
            if all(torch.equal(seen(row), sees(row, columns[: row + 2], window)) for row in rows):
                return window
    except (IndexError, RuntimeError, TypeError, ValueError):  # it looks up what belongs to a text
        pass
    return None
