"""`pytest -p unsteady`: tests as on a busy machine that nobody knows, so that none depends on what rounds take here.

The clock jumps as if the system had done something else, and each size of a target's passes seems up to 3 times as slow
or as fast as it is. `UNSTEADY=SEED` gives other jumps, factors and draws without a seed. Tests that measure clocks
themselves fail.
"""

from __future__ import annotations

import os
import random
import time

from sakiyomi.model_executor.pass_clock import PassClock

SEED = os.environ.get("UNSTEADY", "1")
JUMPS, SECONDS = 0.03, 0.01  # share of readings before which the clock jumps, and mean seconds of a jump

_chance, _read, _add = random.Random(SEED), time.perf_counter, PassClock.add
_ahead = 0.0


def _clock() -> float:
    global _ahead
    if _chance.random() < JUMPS:
        _ahead += _chance.expovariate(1 / SECONDS)
    return _read() + _ahead


def _add_otherwise(self: PassClock, size: int, recorded: bool, seconds: float, *, fresh: bool = False) -> None:
    factor = 3 ** random.Random(f"{SEED} {size}").uniform(-1, 1)
    _add(self, size, recorded, factor * seconds, fresh=fresh)


time.perf_counter = _clock
PassClock.add = _add_otherwise  # type: ignore[method-assign]
