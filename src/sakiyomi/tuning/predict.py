"""From rounds on some texts to the speed of every chain length: a model of acceptance and one of time. Pure floats.

Acceptance: at each place of a text the draft either went on as the text does, or did not, or had nothing to say. A
chain of gamma that begins there is accepted up to the first place that was missed, so that rounds of any gamma up to
the one that was run can be counted on the same text (section 3.1 of arXiv 2211.17192 takes places to be independent
and alike; here they are as they were). Time: a round is the pass over its rows, the draft's passes, and what is
outside both, each the median of what was measured (``theory.round_speedup``).
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sakiyomi.theory import positional_acceptance, round_speedup
from sakiyomi.tuning.watch import Round

__all__ = ["Curve", "Expected", "Place", "RoundCosts", "by_chance", "by_place", "by_rank", "places", "replay"]

SURE = 3  # readings
BUCKETS = (0.0, 0.5, 0.8, 0.95, 1.0)
"""Borders of the drafter's own confidence."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by some count, measured at a few: straight lines between, and beyond the ends on as there.

    Attributes:
        points: (count, seconds), ascending, at least one.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, readings: Iterable[tuple[int, float]]) -> Curve:
        """Medians of what was read at each count; a count that was read once or twice says little beside others."""
        found: dict[int, list[float]] = {}
        for count, seconds in readings:
            found.setdefault(count, []).append(seconds)
        sure = {count: seconds for count, seconds in found.items() if len(seconds) >= SURE} or found
        return cls(tuple((count, statistics.median(sure[count])) for count in sorted(sure)))

    def __call__(self, count: int) -> float:
        """Seconds at a count."""
        if len(self.points) == 1:
            return self.points[0][1]
        at = min(max(bisect_left(self.points, (count,)), 1), len(self.points) - 1)
        (low, a), (high, b) = self.points[at - 1], self.points[at]
        return max(0.0, a + (b - a) * (count - low) / (high - low))


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
    def of(cls, rounds: Sequence[Round], rows: Callable[[int], int], shared: Mapping[int, float]) -> RoundCosts:
        """From rounds of chains of several depths.

        Args:
            rounds: of one drafter, at least one.
            rows: rows that a pass over so many tokens really has.
            shared: seconds of passes by rows, of whatever drafter, for those that this one's rounds do not have.
        """
        own = Curve.of((rows(part.nodes + 1), part.score) for part in rounds)
        score = dict(shared) | dict(own.points)
        return cls(
            Curve(tuple(sorted(score.items()))),
            Curve.of((part.depth, part.draft) for part in rounds),
            Curve.of((part.depth, part.other) for part in rounds),
        )

    def round(self, depth: int, rows: Callable[[int], int]) -> float:
        """Seconds of a round with a chain of this depth; 0: nothing is drafted."""
        return self.score(rows(depth + 1)) + self.draft(depth) * (depth > 0) + self.other(depth)


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a text, as the draft saw it.

    Attributes:
        run: tokens that a chain from here on would have right.
        length: tokens that it would have; the drafter's own end, not that of the gamma that was asked for.
    """

    run: int
    length: int


@dataclass(frozen=True)
class Expected:
    """What is to be expected of a configuration.

    Attributes:
        tau: tokens a round.
        round_seconds: mean time of one.
        speedup: over plain decoding.
    """

    tau: float
    round_seconds: float
    speedup: float


def places(rounds: Sequence[Round], gamma: int) -> list[Place]:
    """Every place of one text, from its rounds.

    A chain that the text follows shows its places too: a chain that begins at its second token goes on with the third.
    Behind a chain of the full gamma that was right to its end nobody knows; there the draft is right as often as at the
    last place of the chains, evenly spread.

    Args:
        rounds: of chains of ``gamma``.
        gamma: what was asked for.
    """
    last = (by_place(rounds) or [0.0])[-1]
    right: list[bool] = []
    lengths: list[int] = []
    owed = 0.0
    for part in rounds:
        accepted, full = part.tokens - 1, part.depth >= gamma
        for step in range(part.tokens):
            if step < accepted:
                hit = True
            elif full and accepted >= gamma:
                owed += last
                hit = owed >= 1.0
                owed -= hit
            else:
                hit = False
            right.append(hit)
            lengths.append(gamma if full else part.depth - step)
    runs = [0] * (len(right) + 1)
    for place in reversed(range(len(right))):
        runs[place] = 1 + runs[place + 1] if right[place] else 0
    return [Place(min(run, length), length) for run, length in zip(runs, lengths, strict=False)]


def replay(
    texts: Sequence[Sequence[Place]], gamma: int, costs: RoundCosts, rows: Callable[[int], int], plain: float
) -> Expected:
    """Rounds of a chain of gamma on these texts.

    Args:
        texts: places of each, at least one in all.
        gamma: at most what the places were taken with.
        costs: of rounds with this drafter.
        rows: rows that a pass over so many tokens really has.
        plain: seconds of a round that drafts nothing, without a drafter.
    """
    depths: list[int] = []
    for text in texts:
        place = 0
        while place < len(text):
            depth = min(gamma, text[place].length)
            place += min(text[place].run, depth) + 1
            depths.append(depth)
    seconds = sum(costs.round(depth, rows) for depth in depths) / len(depths)
    tau = sum(map(len, texts)) / len(depths)
    return Expected(tau, seconds, round_speedup(tau, 0.0, seconds / plain))


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
