"""How far to read ahead: the next round's draft length, from what the last ones brought and from measured costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sakiyomi.theory import marginal_gamma

__all__ = ["AutoGamma", "ConstantGamma", "Costs", "GammaPolicy", "HeuristicGamma", "make_policy"]

MOST = 16  # longest chain that "auto" considers
PROBE_EVERY = 24  # rounds without speculation until it is tried again
PROBE = 2


@dataclass(frozen=True, slots=True)
class Costs:
    """What a round costs on this machine now, in seconds.

    Attributes:
        score: time of a target pass over so many rows.
        draft: time of one draft step of the whole batch.
        overhead: time a round spends outside forwards.
        batch: requests that share the passes.
    """

    score: Callable[[int], float]
    draft: float
    overhead: float
    batch: int = 1


class GammaPolicy(Protocol):
    """Decides for one request."""

    def next(self, costs: Callable[[], Costs]) -> int:
        """Draft tokens to ask for in the next round; 0: none. ``costs`` is only asked by those who weigh them."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """A round proposed ``drafted`` tokens on its longest path and kept ``accepted``."""
        ...


@dataclass(slots=True)
class ConstantGamma:
    """The same number every round."""

    gamma: int

    def next(self, costs: Callable[[], Costs]) -> int:
        """See ``GammaPolicy.next``."""
        return self.gamma

    def observe(self, drafted: int, accepted: int) -> None:
        """Nothing is learnt."""


@dataclass(slots=True)
class HeuristicGamma:
    """Two more after a wholly accepted draft, else one less, at least one (transformers' "heuristic" schedule)."""

    gamma: int = 5

    def next(self, costs: Callable[[], Costs]) -> int:
        """See ``GammaPolicy.next``."""
        return self.gamma

    def observe(self, drafted: int, accepted: int) -> None:
        """See ``GammaPolicy.observe``."""
        if drafted:
            self.gamma = self.gamma + 2 if accepted == drafted else max(1, self.gamma - 1)


class AutoGamma:
    """The gamma of the largest predicted speed-up; none where plain decoding is as fast.

    The acceptance of each place in the draft is estimated from the rounds that reached it, older ones counting less;
    a place never reached is taken to be as the one before. Costs are the machine's own, measured while it works.
    While speculation is off, a short draft is tried now and then: text changes.
    """

    def __init__(self, start: float = 0.75, weight: float = 4.0, memory: float = 0.97) -> None:
        self._start, self._memory = start, memory
        self._weight = weight
        self._kept: list[float] = []
        self._tried: list[float] = []
        self._quiet = 0

    def alphas(self) -> list[float]:
        """Estimated acceptance by place."""
        alphas, prior = [], self._start
        for kept, tried in zip(self._kept, self._tried, strict=True):
            prior = (kept + prior * self._weight) / (tried + self._weight)
            alphas.append(prior)
        return alphas or [self._start]

    def next(self, costs: Callable[[], Costs]) -> int:
        """See ``GammaPolicy.next``."""
        now = costs()
        plain = now.score(now.batch)

        def verify(rows: int) -> float:
            return now.score(now.batch * rows) / plain

        gamma, _ = marginal_gamma(self.alphas(), now.draft / plain, verify, now.overhead / plain, MOST)
        if gamma:
            self._quiet = 0
            return gamma
        self._quiet += 1
        return PROBE if self._quiet % PROBE_EVERY == 0 else 0

    def observe(self, drafted: int, accepted: int) -> None:
        """See ``GammaPolicy.observe``."""
        places = min(drafted, accepted + 1)
        while len(self._tried) < places:
            self._kept.append(0.0)
            self._tried.append(0.0)
        for i in range(places):
            self._kept[i] = self._kept[i] * self._memory + (i < accepted)
            self._tried[i] = self._tried[i] * self._memory + 1.0


def make_policy(gamma: int | str) -> GammaPolicy:
    """The policy that ``SamplingParams.gamma`` names; values were checked there."""
    if gamma == "auto":
        return AutoGamma()
    if gamma == "heuristic":
        return HeuristicGamma()
    return ConstantGamma(int(gamma))
