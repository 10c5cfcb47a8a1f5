"""Memory for packed weights: few large pieces on huge pages, where the system gives them.

A decoding pass reads all weights once, and on pages of 4 KiB a core waits for addresses: on huge ones it reads a fifth
more in the same time (benchmarks/log/passes-cpu.md). Pages are asked for with ``madvise``,
since most systems give them to nobody else.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20  # of a huge page on x86 and, with pages of 4 KiB, on ARM
MOST = 64 << 20  # bytes of a piece for several tensors
ALIGNED = 64  # a line of the cache


class WeightMemory:
    """Hands out tensors that are freed with the last one of their piece.

    Pieces grow with what was asked for, so that a small model reserves little; what is not written takes no memory.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)  # what is left of the last one
        self._given = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor as ``torch.empty`` gives it."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // ALIGNED) * ALIGNED
        if not size:
            return torch.empty(shape, dtype=dtype)
        if room > len(self._piece):
            found = _piece(max(room, min(self._given, MOST)))
            if found is None:
                return torch.empty(shape, dtype=dtype)
            self._piece = found
        self._given += room
        made, self._piece = self._piece[:size], self._piece[room:]
        return made.view(dtype).view(*shape)


def _piece(size: int) -> Tensor | None:
    """Bytes from a border of huge pages on, at least so many; None: there are none such."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        held = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(held, dtype=torch.uint8)
        skipped = -whole.data_ptr() % PAGE
        held.madvise(mmap.MADV_HUGEPAGE, skipped, len(whole) - skipped)
    except OSError:  # no memory, of which torch tells more; or a system without such pages
        return None
    return whole[skipped:]
