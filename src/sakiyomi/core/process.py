"""State of torch and OpenMP that all threads of a process share."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading

TORCH_STATE = threading.RLock()
"""Held while something changes torch's default dtype or puts it back.

transformers sets the default dtype while it builds a model. Two models that are built at once would otherwise get
parameters of each other's dtype.
"""

_SOFT = 1  # omp_pause_soft: what the program has set stays


def release_workers() -> None:
    """End the calling thread's OpenMP workers; they come back with its next parallel work.

    Every thread that computes in parallel has workers of its own. Where a process has more of them than processors,
    libgomp lets none spin any more: each sleeps at the end of each parallel piece, and waking them hundreds of times a
    pass took half of the time of a batch of 32 (benchmarks/log/passes-cpu.md). A thread calls this when another one
    computes from then on. Does nothing with another OpenMP than GNU's.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # it is not loaded, or older than OpenMP 5
            ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).omp_pause_resource_all(_SOFT)


_spared: list[int] = []


def share_processors(share: bool) -> None:
    """Leave one processor to work beside this process, such as a compiler; or have torch compute on all of its own.

    Threads that wait for each other by spinning wait for long where something else has one of their processors: on two
    of them a text took five times as long beside a compiler as on one (benchmarks/log/passes-cpu.md).
    """
    import torch

    if share and not _spared:
        _spared.append(torch.get_num_threads())
        torch.set_num_threads(max(1, _spared[0] - 1))
    elif not share and _spared:
        torch.set_num_threads(_spared.pop())
