"""A chi-square test of sampled text: counts of tokens against the counts that the target's probabilities predict.

Every token of every text is a sample. Given what stands before it, a lossless sampler draws it from the target's
distribution p, whatever was drafted; so for any division of the vocabulary, and any grouping of places, that is made
before the token is drawn, counts less expected counts are sums of martingale differences, whose covariance is known
from p alone: diag(m) - m m' for a place where the parts have the masses m. The vocabulary is divided by rank in p (of
100000 tokens few are likely). Places are grouped by what must not influence the token: the token before it (if a
round shares one uniform, each token by itself may still be right), or the token of another request of the batch.

The test needs no texts of the same prompt, nor many texts; it knows no engine, drafter or rule. Sources: the
chi-square test from p's own covariance, Pearson 1900; of the rows of a Markov chain, Anderson and Goodman 1957; the
central limit theorem for martingales, Hall and Heyde 1980, section 3.2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST = 100.0
"""Cells that are expected less often are joined, for the test relies on sums being nearly normal: with this many the
chance of what chi-square calls one in a million was measured as up to 2.2 times that (with 25 as 5 times)."""
Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ranked:
    """Tokens of one text by rank.

    Attributes:
        part: (n,) part of the vocabulary that each token lies in.
        mass: (n, parts) what the target gives to each part there.
        possible: the target gives something to each of the tokens.
    """

    part: Ints
    mass: Array
    possible: bool


def rank(probs: Tensor, tokens: Sequence[int], bounds: Sequence[int]) -> Ranked:
    """Find the parts that tokens lie in.

    Args:
        probs: (n, V) the target's distributions, each given the tokens before it.
        tokens: (n,) what came.
        bounds: ranks at which parts end; (1, 4): the most probable token, the next three, the others.
    """
    chosen = torch.tensor(list(tokens), dtype=torch.int64, device=probs.device)[:, None]
    own = probs.gather(1, chosen)
    # Of equal ones (many, in bfloat16) the smaller id has the better rank: parts must not depend on what came.
    before = (probs == own) & (torch.arange(probs.shape[1], device=probs.device) < chosen)
    ranks = ((probs > own) | before).sum(1)
    ends = [min(bound, probs.shape[1]) for bound in bounds]
    best = probs.topk(ends[-1], dim=1).values.double()
    whole = probs.double().sum(1)
    sums = torch.stack([torch.zeros_like(whole), *(best[:, :end].sum(1) for end in ends), whole])
    mass: Array = (torch.diff(sums, dim=0) / whole).clamp_min(0).T.cpu().numpy()
    part = torch.bucketize(ranks, torch.tensor(list(bounds), device=ranks.device), right=True)
    return Ranked(part.cpu().numpy(), mass, not bool((own == 0).any()))


@dataclass(frozen=True)
class Fit:
    """What the counts say.

    Attributes:
        tokens: that were counted.
        statistic, freedom: chi-square, and its degrees of freedom.
        p: the chance of a larger one where the text is the target's own.
        distance: total variation between counted and expected shares of the cells; noise alone makes some.
        noise: about how much noise alone makes.
        power: the least chance to see a distribution ``away`` from the target's, at this level.
        away: the total variation over the cells that ``power`` is about.
        seen: the total variation that is seen with a chance of ``sure``; infinite where there are no cells.
        level: the text is called another's where p is below it.
    """

    tokens: int
    statistic: float
    freedom: int
    p: float
    distance: float
    noise: float
    power: float
    away: float
    seen: float
    level: float

    @property
    def ok(self) -> bool:
        """The counts may come from the target's own distribution."""
        return not self.p < self.level

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"ok": self.ok, "seen": None if self.seen == math.inf else self.seen}


class Frequencies:
    """Counts of tokens by part of the vocabulary, in groups of places.

    Args:
        groups, parts: how many of each.
    """

    def __init__(self, groups: int, parts: int) -> None:
        self.tokens = 0
        self._parts = parts
        self._seen: Array = np.zeros((groups, parts))
        self._expected: Array = np.zeros((groups, parts))
        self._covariance: Array = np.zeros((groups, parts, parts))
        self._impossible = False

    def add(self, text: Ranked, groups: Sequence[int] | Ints) -> None:
        """Count a text, or the first tokens of it.

        Args:
            text: ranked by as many parts.
            groups: (at most n,) group of each place, known before its token was drawn.
        """
        behind = np.asarray(groups, np.int64)
        part, mass = text.part[: len(behind)], text.mass[: len(behind)]
        self._impossible |= not text.possible
        for group in np.unique(behind):
            here = mass[behind == group]
            self._seen[group] += np.bincount(part[behind == group], minlength=self._parts)
            self._expected[group] += here.sum(0)
            self._covariance[group] += np.diag(here.sum(0)) - here.T @ here
        self.tokens += len(behind)

    def fit(self, level: float, away: float = 0.02, sure: float = 0.999) -> Fit:
        """Test the counts.

        Args:
            level: odds of a false alarm.
            away: the total variation that ``Fit.power`` is about.
            sure: the power that ``Fit.seen`` is about.
        """
        statistic, freedom, widest, distance, noise = 0.0, 0, 0.0, 0.0, 0.0
        for seen, expected, covariance in self._cells():
            difference = seen - expected
            distance += float(np.abs(difference).sum()) / 2
            noise += float(np.sqrt(np.clip(np.diag(covariance), 0, None)).sum()) / 2 * (2 / np.pi) ** 0.5
            if len(seen) < 2:
                continue
            # The cells of a group sum to what they must: one of them says nothing new.
            statistic += float(difference[1:] @ np.linalg.solve(covariance[1:, 1:], difference[1:]))
            freedom += len(seen) - 1
            widest += _widest(covariance)
        count = max(self.tokens, 1)
        p = 0.0 if self._impossible else _tail(statistic, freedom) if freedom else 1.0
        # By Cauchy and Schwarz d' C^-1 d >= (s'd)^2 / (s'C s) for the signs s of d, and s'd is twice the distance.
        shift = (2 * away * count) ** 2 / widest if widest else 0.0
        power = chance_to_see(shift, freedom, level)
        least = away * (shift_to_see(sure, freedom, level) / shift) ** 0.5 if shift and freedom else math.inf
        return Fit(self.tokens, statistic, freedom, p, distance / count, noise / count, power, away, least, level)

    def _cells(self) -> list[tuple[Array, Array, Array]]:
        """Counts, what was expected and the covariance of each group; cells that are expected too seldom are joined."""
        found = []
        for seen, expected, covariance in zip(self._seen, self._expected, self._covariance, strict=True):
            joint = _joined(expected)
            if len(joint):
                found.append((joint @ seen, joint @ expected, joint @ covariance @ joint.T))
        return found


def chance_to_see(shift: float, freedom: int, level: float) -> float:
    """Power of a chi-square test: the chance that the statistic exceeds its bound.

    Args:
        shift: the noncentrality, d' C^-1 d for a difference d of the sums and their covariance C.
        freedom: degrees of freedom.
        level: odds of a false alarm.
    """
    if not freedom or not shift:
        return 0.0
    # A noncentral chi-square is a central one whose degrees of freedom grow by twice a Poisson number.
    mean = shift / 2
    spread = 12 * mean**0.5 + 60
    extra = torch.arange(max(mean - spread, 0) // 1, mean + spread, dtype=torch.float64)
    weights = (extra * math.log(mean) - mean - torch.special.gammaln(extra + 1)).exp()
    half = torch.tensor(_bound(freedom, level) / 2, dtype=torch.float64)
    return float((weights * torch.special.gammaincc(freedom / 2 + extra, half)).sum())


@lru_cache(maxsize=256)  # an audit asks after every batch of texts
def shift_to_see(power: float, freedom: int, level: float) -> float:
    """The noncentrality at which ``chance_to_see`` is so large."""
    return _solve(lambda shift: chance_to_see(shift, freedom, level), power)


@lru_cache(maxsize=256)
def _bound(freedom: int, level: float) -> float:
    """The statistic that false alarms exceed with odds of ``level``."""
    return _solve(lambda value: -_tail(value, freedom), -level)


def _tail(statistic: float, freedom: int) -> float:
    """The chance that a chi-square variable exceeds a value. This package does not depend on scipy."""
    shape, value = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(shape, value))


def _solve(rising: Callable[[float], float], value: float) -> float:
    """The positive argument at which a rising function takes a value, by bisection to the last bits."""
    low, high = 0.0, 1.0
    while rising(high) < value:
        low, high = high, 2 * high
    for _ in range(53):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


def _joined(expected: Array) -> Array:
    """(cells, parts) of 0 and 1: neighbours joined until each cell is expected often enough; none if all are not."""
    rows: list[Array] = []
    row, mass = np.zeros(len(expected)), 0.0
    for i, value in enumerate(expected):
        row[i], mass = 1.0, mass + value
        if mass >= LEAST:
            rows.append(row)
            row, mass = np.zeros(len(expected)), 0.0
    if rows:
        rows[-1] = rows[-1] + row
    return np.array(rows)


def _widest(covariance: Array) -> float:
    """The largest s' C s over signs s."""
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(covariance))))
    return float(np.einsum("ki,ij,kj->k", signs, covariance, signs).max())
