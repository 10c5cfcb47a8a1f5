"""How many threads compute: as many as there are fast cores, or fewer while other programs need them.

Unless the program or its environment (`OMP_NUM_THREADS`) has set a number, it is that of
`processors.computing_threads`: torch knows no quota of a container and no efficient cores.

Threads that share every small piece of a pass wait for the slowest of them. Where another program has one of their
processors, each of the hundred pieces of a pass may wait for that program's turn to end: on two busy processors two
threads were a hundred times slower than one (benchmarks/log/passes-cpu.md). So the time of a piece is
measured a few times a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sakiyomi.core.processors import computing_threads, physical_cores, usable_cpus

CALLS = 8  # parallel pieces of a trial; each takes about ten microseconds
LONG = 2e-3  # seconds of a trial from which on a thread must have waited for its processor
EVERY, SELDOM = 0.25, 8.0  # seconds between trials, and at most between those that try more threads in vain
GRAIN = 1 << 15  # numbers for which torch takes another thread


class ThreadGovernor:
    """Sets the number of threads of the thread that calls it.

    Args:
        trial: seconds that some parallel pieces take on a number of threads.
        clock: seconds.
    """

    def __init__(
        self, trial: Callable[[int], float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._trial, self._clock = trial or _trial, clock
        self._now = 0
        self._next, self._widen_at, self._pause = 0.0, 0.0, EVERY

    def check(self) -> None:
        """Look whether it is time for a trial; called between passes."""
        if self._clock() < self._next:
            return
        import torch

        current = torch.get_num_threads()
        if not self._now and (limit := begin_with(current)) < current:
            self._set(current := limit)
        if not _chosen or self._now not in (0, current):
            _chosen[:] = [current]
        self._now = current
        if current > 1 and self._crowded(1):
            self._set(max(1, current // 2, min(current - 1, (os.cpu_count() or 1) - _others(current))))
            self._widen_at = self._clock() + self._pause
        elif current < _chosen[0] and self._clock() >= self._widen_at:
            self._widen()
        self._next = self._clock() + EVERY

    def _widen(self) -> None:
        """Try more threads, and stay with them if they do not wait."""
        before = self._now
        self._set(min(_chosen[0], 2 * before))
        if self._crowded(3):
            self._set(before)
            self._pause = min(2 * self._pause, SELDOM)
        else:
            self._pause = EVERY
        self._widen_at = self._clock() + self._pause

    def _crowded(self, good: int) -> bool:
        """Whether two trials are long, before `good` more trials are short than long."""
        long = short = 0
        while long < 2 and short < good + long:
            if self._trial(self._now) > LONG:
                long += 1
            else:
                short += 1
        return long == 2

    def _set(self, count: int) -> None:
        import torch

        torch.set_num_threads(count)
        self._now = count


def begin_with(threads: int, root: Path = Path("/")) -> int:
    """The threads to begin with where torch has so many: fewer if torch itself has chosen the number, and too many.

    A number is taken for torch's own if the environment has none and it is that of all processors or of all cores.
    """
    cpus = usable_cpus()
    if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return threads
    if threads not in (len(cpus), len(physical_cores(cpus, root))):
        return threads
    return min(threads, computing_threads(cpus, root))


_chosen: list[int] = []
"""By the program or its environment: most threads that compute. torch cannot say it: a new thread of the program begins
with what a governor has set in another one."""
_local = threading.local()


def govern_threads() -> None:
    """Have the calling thread compute with as many threads as have a processor; see the module."""
    governor: ThreadGovernor | None = getattr(_local, "governor", None)
    if governor is None:
        governor = _local.governor = ThreadGovernor()
    governor.check()


def _trial(threads: int) -> float:
    import torch

    numbers = torch.zeros(threads * GRAIN)
    numbers.add_(1)  # workers may have to be made
    began = time.perf_counter()
    for _ in range(CALLS):
        numbers.add_(1)
        if (seconds := time.perf_counter() - began) > LONG:
            break
    return seconds


def _others(threads: int) -> int:
    """Threads of other programs that want a processor now, ours being busy; 1 where the system does not say it."""
    with suppress(OSError, ValueError, IndexError):
        running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]
        return max(1, int(running) - threads)
    return 1
