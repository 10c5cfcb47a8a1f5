"""Memory for packed weights: a few large pieces on huge pages, if the system has them.

A decoding pass reads all weights once. On pages of 4 KiB a core waits for addresses; on huge pages it reads a fifth
more in the same time (benchmarks/log/passes-cpu.md). ``madvise`` asks for huge pages, as most systems require.
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

    Pieces grow with the memory in use, so that a small model reserves little; pages that are not written take none.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)  # the rest of the last one
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
    """At least so many bytes, from the border of a huge page on; None: there are no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        held = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(held, dtype=torch.uint8)
        skipped = -whole.data_ptr() % PAGE
        held.madvise(mmap.MADV_HUGEPAGE, skipped, len(whole) - skipped)
    except OSError:  # no memory, which torch reports better, or a system without huge pages
        return None
    return whole[skipped:]
