"""The cost of passes by number of rows: running means of measured seconds, and trial passes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from sakiyomi.core.running_mean import running_mean

SLOW = 0.002  # seconds; a slower trial pass is not repeated
TRIALS = 4  # the first one warms up
FEW = (1, 4, 8)  # rows of the first trial passes of a fast model, from which other sizes are estimated
TRIAL_SHARE = 0.02  # share of the seconds of all passes that all other trials together may take
NEWS = 0.02  # relative change of a mean that is reported: plans made from it take time


class PassClock:
    """Seconds of decoding passes, eager and recorded.

    Args:
        recorded: whether passes of so many rows are replayed now.
        offloaded: every pass reads weights from elsewhere: no trial passes, and no warm-up.

    Attributes:
        version: changes with every reported change.
        made: passes so far that were recorded or compared first, which takes many times as long.
    """

    def __init__(self, recorded: Callable[[int], bool], *, offloaded: bool) -> None:
        self.version = self.made = 0
        self._recorded, self._offloaded = recorded, offloaded
        self._means: dict[tuple[int, bool], tuple[int, float]] = {}  # of how many readings
        self._seconds: dict[tuple[int, bool], float] = {}  # of these, as they were told last
        self._warm: set[tuple[int, bool]] = set()
        self._costs: dict[int, float] = {}  # what `seconds` has found since the last reading
        self._total = self._told = 0.0  # seconds of all passes, and of those before something was known last
        self._trying = 0.0  # seconds of trials but those first ones

    def clear(self) -> None:
        """Drop all readings."""
        self.version += 1
        for known in (self._means, self._seconds, self._warm, self._costs):
            known.clear()

    def add(self, size: int, recorded: bool, seconds: float, *, fresh: bool = False) -> None:
        """Add a reading. The first eager pass, and a pass that was recorded first, are warm-ups and do not count."""
        key = (size, recorded)
        self.made += fresh
        self._total += seconds
        if not fresh and (key in self._warm or recorded or self._offloaded):
            count, mean = self._means.get(key, (0, seconds))
            mean = min(mean, seconds) if count < 2 else running_mean(mean, seconds)  # the better of two counts
            self._means[key] = count + 1, mean
            told = self._seconds.get(key)
            if told is None or abs(mean - told) > NEWS * told:
                self._seconds[key] = mean
                self._tell()
        if self._total > 2 * self._told:  # the budget for trials has grown
            self._tell()
        self._warm.add(key)

    def _tell(self) -> None:
        self.version += 1
        self._costs.clear()
        self._told = self._total

    def known(self, size: int) -> float | None:
        """Seconds of a pass of this size; None: no such pass was made.

        An eager pass that will be recorded counts as its replay.
        """
        recorded = self._seconds.get((size, True))
        if recorded is not None and self._recorded(size):
            return recorded
        eager = self._seconds.get((size, False))
        return eager * self._gain() if eager is not None else None

    def _gain(self) -> float:
        """The factor from an eager pass's time to a replayed one's, from the sizes with both readings."""
        ratios = [
            seconds / self._seconds[size, False]
            for (size, recorded), seconds in self._seconds.items()
            if recorded and (size, False) in self._seconds and self._recorded(size)
        ]
        return min(1.0, max(ratios, default=1.0))

    def seconds(self, size: int, sizes: Sequence[int], trial: Callable[[int], None]) -> float:
        """The cost of a pass of this size, in seconds.

        The smallest sizes are tried at once, of a slow model only the first one asked for. Others are estimated until a
        trial costs little compared with the passes so far: trying all sizes before the first text would take longer
        than the text, and a draft that is scored measures its size as well.

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
        own = self.known(size)
        if own is None and self._offloaded and size > sizes[0]:
            # No trial of a pass that reads all weights: further rows count as free until a round has measured them.
            return self.seconds(sizes[bisect_left(sizes, min(size, sizes[-1] + 1)) - 1], sizes, trial)
        if own is None:
            few = [sizes[min(bisect_left(sizes, rows), len(sizes) - 1)] for rows in FEW]
            slow = any((self.known(less) or 0.0) > SLOW for less in sizes if less < size)
            own = self._guess(size, sizes, () if slow else few, trial) if slow or size not in few else 0.0
            if not own:
                own = self._tried(size, sizes[0], trial)
            elif self._trying + 2 * own <= TRIAL_SHARE * self._total:
                before = self._total
                own = self._tried(size, sizes[0], trial)
                self._trying += self._total - before
        # Limits a reading that was disturbed by other work: two passes over half the rows do the same work, and so
        # does a larger pass.
        half = self.known(size // 2) if size > 1 else None
        double = self.known(2 * size)
        return min([own, *([2 * half] if half else []), *([double] if double else [])])

    def _tried(self, size: int, least: int, trial: Callable[[int], None]) -> float:
        for _ in range(TRIALS):
            trial(size)
            if (self.known(size) or 0.0) > SLOW:
                break
        found, alone = self.known(size), self.known(least)
        if found and alone and 1 < size <= FEW[-1] and found > size / 2 * alone:
            trial(size)  # it may have been disturbed, and rows that seem too expensive would never be measured again
            found = self.known(size)
        assert found is not None
        return found

    def _guess(self, size: int, sizes: Sequence[int], few: Sequence[int], trial: Callable[[int], None]) -> float:
        """Estimate a size without a reading from those of other sizes.

        Between two sizes it is interpolated. Beyond them it lies on their line, and is at least the largest reading
        times the square root of the ratio of rows. A trial soon corrects an estimate that is too high; one that is too
        low slows a text down. Of a slow model the rows up to the last of ``FEW`` count as free until a larger pass was
        made: such a round costs less than a trial, which commits no token.
        """
        for small in few:
            self.seconds(small, sizes, trial)
        known = [(other, found) for other in sizes if (found := self.known(other)) is not None]
        if known[0][1] > SLOW and known[-1][0] < FEW[-1]:
            known.append((FEW[-1], known[-1][1]))
        place = bisect_left(known, (size, 0.0))
        last, own = known[place := min(place, len(known) - 1)]
        first, below = known[max(0, place - 1)]
        line = own + max(0.0, own - below) / max(1, last - first) * (size - last)
        return line if size < last else max(line, own * (size / last) ** 0.5)
