"""What passes of each number of rows cost on this machine: running means of the clock, and trial passes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from sakiyomi.core.running_mean import running_mean

__all__ = ["PassClock"]

SLOW = 0.05  # seconds of a trial pass from which on one is enough
TRIALS = 4  # the first one warms up


class PassClock:
    """Seconds of decoding passes, eager and recorded ones.

    Args:
        recorded: whether passes of so many rows are replayed now.
        offloaded: weights are read from elsewhere in every pass: no trial passes, and no warm-up.

    Attributes:
        version: another one after each reading that counts.
    """

    def __init__(self, recorded: Callable[[int], bool], *, offloaded: bool) -> None:
        self.version = 0
        self._recorded, self._offloaded = recorded, offloaded
        self._seconds: dict[tuple[int, bool], float] = {}
        self._warm: set[tuple[int, bool]] = set()
        self._costs: dict[int, float] = {}  # what `seconds` has found since the last reading

    def clear(self) -> None:
        """Forget all readings."""
        self.version += 1
        for known in (self._seconds, self._warm, self._costs):
            known.clear()

    def add(self, size: int, recorded: bool, seconds: float, *, fresh: bool = False) -> None:
        """Take a reading; the first one of its kind, and one that was recorded on the way, is only a warm-up."""
        key = (size, recorded)
        if not fresh and (key in self._warm or self._offloaded):
            self._seconds[key] = running_mean(self._seconds.get(key), seconds)
            self.version += 1
            self._costs.clear()
        self._warm.add(key)

    def known(self, size: int) -> float | None:
        """Seconds of a pass of this size; None: none was made.

        An eager pass that will be replayed when it comes more often counts as the replay that it will be.
        """
        recorded = self._seconds.get((size, True))
        if recorded is not None and self._recorded(size):
            return recorded
        eager = self._seconds.get((size, False))
        return eager * self._gain() if eager is not None else None

    def _gain(self) -> float:
        """What replaying makes of an eager pass's time, by the sizes of which both are known."""
        ratios = [
            seconds / self._seconds[size, False]
            for (size, recorded), seconds in self._seconds.items()
            if recorded and (size, False) in self._seconds and self._recorded(size)
        ]
        return min(1.0, max(ratios, default=1.0))

    def seconds(self, size: int, sizes: Sequence[int], trial: Callable[[int], None]) -> float:
        """What a pass of this size costs, by a trial if none was made.

        Args:
            size: one of `sizes`, or more than the largest.
            sizes: row counts of passes, ascending.
            trial: runs an empty pass of a size.
        """
        found = self._costs.get(size)
        if found is None:
            found = self._costs[size] = self._cost(size, sizes, trial)
        return found

    def _cost(self, size: int, sizes: Sequence[int], trial: Callable[[int], None]) -> float:
        if self.known(size) is None and self._offloaded and size > sizes[0]:
            # What reads all weights is not tried out: rows come next to free, until a round has shown otherwise.
            return self.seconds(sizes[bisect_left(sizes, min(size, sizes[-1] + 1)) - 1], sizes, trial)
        if self.known(size) is None:
            for _ in range(TRIALS):
                trial(size)
                if (self.known(size) or 0.0) > SLOW:
                    break
        own = self.known(size)
        assert own is not None
        # A reading taken while other work went on is not believed for long: half the rows twice would do as well, and
        # a larger pass does what a smaller one does.
        half = self.known(size // 2) if size > 1 else None
        double = self.known(2 * size)
        return min([own, *([2 * half] if half else []), *([double] if double else [])])
