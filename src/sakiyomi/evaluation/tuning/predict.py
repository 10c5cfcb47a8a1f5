"""Predicts the speed of every chain length from rounds on some texts, by a model of acceptance and one of time.

Acceptance: chains of a few lengths run on many texts; a length between two is the longer one, cut (section 3.1 of arXiv
2211.17192 assumes independent places of equal acceptance; here they are as measured). Time: a round is the target's
pass over its rows, the draft's passes, and the time outside both, as measured (``theory.round_speedup``).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sakiyomi.core.drops import ratio_error
from sakiyomi.evaluation.tuning.lines import between
from sakiyomi.evaluation.tuning.watch import Round
from sakiyomi.theory import positional_acceptance, round_speedup

SURE = 0.02  # share of the readings
BUCKETS = (0.0, 0.5, 0.8, 0.95, 1.0)
"""Borders of the drafter's own confidence."""
Rows = Callable[[int], int]
"""Rows that a pass over so many tokens really has."""
Texts = Sequence[Sequence[Round]]


def calm(rounds: Sequence[Round]) -> list[Round]:
    """Limit rounds that other work slowed down: none counts as more than twice the median of its depth.

    All parts of such a round shrink by one factor. With a limit for each part, short parts would lose more, and rounds
    of many parts would look cheaper than plain ones.
    """
    by_depth: dict[int, list[float]] = {}
    for part in rounds:
        by_depth.setdefault(part.depth, []).append(part.seconds)
    most = {depth: 2 * statistics.median(seconds) for depth, seconds in by_depth.items()}
    return [part.shrunk(min(1.0, most[part.depth] / part.seconds)) for part in rounds]


def usual(rounds: Sequence[Round]) -> float:
    """Mean seconds of calm rounds."""
    return statistics.fmean(part.seconds for part in calm(rounds))


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by some count, measured at a few: straight lines between, and beyond the ends on as there.

    Attributes:
        points: (count, seconds), ascending, at least one.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, readings: Iterable[tuple[int, float]]) -> Curve:
        """Means of what was read at each count; a count with hardly any readings is left out."""
        found: dict[int, list[float]] = {}
        for count, seconds in readings:
            found.setdefault(count, []).append(seconds)
        least = SURE * sum(map(len, found.values()))
        return cls(
            tuple((count, statistics.fmean(found[count])) for count in sorted(found) if len(found[count]) >= least)
        )

    def __call__(self, count: int) -> float:
        """Seconds at a count."""
        return max(0.0, between(self.points, count))


@dataclass(frozen=True)
class RoundCosts:
    """What a round takes by the depth of its chain.

    Attributes:
        score: a target pass, by its rows.
        draft, other: the draft's forwards, and what is outside all forwards, by depth.
    """

    score: Curve
    draft: Curve
    other: Curve

    @classmethod
    def of(cls, rounds: Sequence[Round], rows: Rows, shared: Mapping[int, float]) -> RoundCosts:
        """From rounds of chains of several depths.

        Args:
            rounds: of one drafter, at least one.
            rows: rows that a pass over so many tokens really has.
            shared: seconds of passes by rows, of whatever drafter, for those that this one's rounds do not have.
        """
        rounds = calm(rounds)
        own = Curve.of((rows(part.nodes + 1), part.score) for part in rounds)
        score = dict(shared) | dict(own.points)
        return cls(
            Curve(tuple(sorted(score.items()))),
            Curve.of((part.depth, part.draft) for part in rounds),
            Curve.of((part.depth, part.other) for part in rounds),
        )

    def round(self, depth: int, rows: Rows) -> float:
        """Seconds of a round with a chain of this depth; 0: nothing is drafted."""
        return self.score(rows(depth + 1)) + self.draft(depth) + self.other(depth)


@dataclass(frozen=True)
class Expected:
    """Prediction for a configuration.

    Attributes:
        tau: tokens a round.
        round_seconds: mean time of one.
        speedup: over plain decoding.
        sampling: standard error of tau by the choice of texts, in shares of it.
    """

    tau: float
    round_seconds: float
    speedup: float
    sampling: float


@dataclass(frozen=True)
class Chains:
    """Rounds of chains of a few lengths, each on the same texts.

    Attributes:
        texts: rounds of each text, by gamma; 1 is among them.
    """

    texts: Mapping[int, Texts]

    def rounds(self, gamma: int) -> list[Round]:
        """All those of a length that was run."""
        return [part for text in self.texts[gamma] for part in text]

    def tau(self, gamma: int) -> float:
        """Tokens a round.

        Of a length that was not run: longer chains looked at only so far, corrected as that is off at the next shorter
        length. It is because rounds begin at other places, where some drafters are better or worse than elsewhere.
        """
        low, high = self._between(gamma)
        found = self._cut(high, gamma)
        if low == high:
            return found
        off = self._cut(low, low) / self._cut(high, low) - 1.0
        return found * (1.0 + off * (high - gamma) / (high - low))

    def expect(self, gamma: int, costs: RoundCosts, rows: Rows, plain: float) -> Expected:
        """Of chains of this length, on these texts.

        Args:
            gamma: at most the longest one.
            costs: of rounds with this drafter.
            rows: rows that a pass over so many tokens really has.
            plain: seconds of a round that drafts nothing, without a drafter.
        """
        high = self._between(gamma)[1]
        tau = self.tau(gamma)
        seconds = statistics.fmean(costs.round(min(part.depth, gamma), rows) for part in self.rounds(high))
        return Expected(tau, seconds, round_speedup(tau, 0.0, seconds / plain), ratio_error(counts(self.texts[high])))

    def _between(self, gamma: int) -> tuple[int, int]:
        """The longest that was run and is not longer, and the shortest that is not shorter."""
        return max(run for run in self.texts if run <= gamma), min(run for run in self.texts if run >= gamma)

    def _cut(self, run: int, gamma: int) -> float:
        return 1.0 + statistics.fmean(min(part.tokens - 1, gamma) for part in self.rounds(run))


def weighed(texts: Texts, few: Texts, many: Texts, plain: float) -> Expected:
    """Prediction for gamma "auto", which chooses the draft length every round; from few texts.

    Args:
        texts: their rounds.
        few, many: rounds of long chains on the same texts, and on many: where those have more accepted on the many, so
            have these.
        plain: seconds of a round that drafts nothing, without a drafter.
    """
    seconds = usual([part for text in texts for part in text])
    accepted, there, everywhere = (
        statistics.fmean(part.tokens - 1 for text in some for part in text) for some in (texts, few, many)
    )
    tau = 1.0 + accepted * (everywhere / there if there else 1.0)
    return Expected(tau, seconds, round_speedup(tau, 0.0, seconds / plain), ratio_error(counts(texts)))


def counts(texts: Texts) -> list[tuple[int, int]]:
    """(tokens, rounds) of each text."""
    return [(sum(part.tokens for part in text), len(text)) for text in texts if text]


def by_place(rounds: Sequence[Round]) -> list[float]:
    """Alpha of the first, second, ... token of a draft."""
    return positional_acceptance([part.depth for part in rounds], [min(part.tokens - 1, part.depth) for part in rounds])


def by_rank(rounds: Sequence[Round]) -> list[float]:
    """How often the first, second, ... candidate of a place was the one that came, where so many were listed."""
    places = [place for part in rounds for place in part.judged]
    found = []
    for rank in range(max((place.listed for place in places), default=0)):
        listed = [place for place in places if place.listed > rank]
        found.append(sum(place.rank == rank for place in listed) / len(listed))
    return found


def by_chance(rounds: Sequence[Round]) -> list[dict[str, float]]:
    """How often the first candidate came, by how sure of it the drafter was; empty where it does not say."""
    places = [place for part in rounds for place in part.judged if place.chance is not None]
    found = []
    for low, high in itertools.pairwise(BUCKETS):
        within = [place for place in places if low <= (place.chance or 0.0) < high or (place.chance == high == 1.0)]
        if within:
            rate = sum(place.rank == 0 for place in within) / len(within)
            found.append({"from": low, "to": high, "places": len(within), "accepted": rate})
    return found
