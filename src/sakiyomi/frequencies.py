"""How often tokens came, against what the target's own probabilities make expected: a chi-square test of sampled text.

Every token of every text is a sample. Given what stands before it, a lossless sampler draws it from the target's
distribution p, whatever was drafted; so for any division of the vocabulary that is made before the token is drawn,
counts less expected counts are sums of martingale differences, whose covariance is known from p alone:
diag(m) - m m' for a place where the parts have the masses m. The vocabulary is divided by rank in p (of 100000 tokens
few are likely), and places by the rank of the token before, so that pairs of tokens are seen together: with a uniform
shared by a round each token by itself may be as it should be.

The test does not need texts of the same prompt, nor many texts; it knows no engine, drafter or rule. Sources: the
chi-square test from p's own covariance, Pearson 1900; the central limit theorem for martingales, Hall and Heyde 1980,
section 3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Fit", "Frequencies", "chance_to_see"]

RANKS = (1, 4, 16)
"""Parts of the vocabulary: the most probable token, the next three, the next twelve, and the others."""
LEAST = 100.0
"""Cells that are expected less often are joined, for the test relies on sums being nearly normal: with this many the
chance of what chi-square calls one in a million was measured as up to 2.2 times that (with 25 as 5 times)."""
Array = NDArray[np.float64]


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
    level: float

    @property
    def ok(self) -> bool:
        """The counts may come from the target's own distribution."""
        return not self.p < self.level

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"ok": self.ok}


class Frequencies:
    """Counts of tokens by rank, behind tokens of each rank."""

    def __init__(self) -> None:
        parts = len(RANKS) + 1
        self.tokens = 0
        self._seen: Array = np.zeros((parts, parts))
        self._expected: Array = np.zeros((parts, parts))
        self._covariance: Array = np.zeros((parts, parts, parts))
        self._impossible = False

    def add(self, probs: Tensor, tokens: Sequence[int]) -> None:
        """Count a text.

        Args:
            probs: (n, V) the target's distributions, each given the tokens before it.
            tokens: (n,) what came.
        """
        if not tokens:
            return
        chosen = torch.tensor(list(tokens), device=probs.device)[:, None]
        own = probs.gather(1, chosen)
        # Of equal ones (many, in bfloat16) the smaller id has the better rank: parts must not depend on what came.
        before = (probs == own) & (torch.arange(probs.shape[1], device=probs.device) < chosen)
        rank = ((probs > own) | before).sum(1)
        bounds = [min(bound, probs.shape[1]) for bound in RANKS]
        best = probs.topk(bounds[-1], dim=1).values.double()
        inside = [best[:, :bound].sum(1) for bound in bounds]
        whole = probs.double().sum(1)
        masses = torch.diff(torch.stack([torch.zeros_like(whole), *inside, whole]), dim=0) / whole
        mass: Array = masses.clamp_min(0).T.cpu().numpy()
        part = torch.bucketize(rank, torch.tensor(RANKS, device=rank.device), right=True).cpu().numpy()
        self._impossible |= bool((own == 0).any())
        behind = np.concatenate([[0], part[:-1]])
        parts = len(RANKS) + 1
        for group in range(parts):
            here = mass[behind == group]
            self._seen[group] += np.bincount(part[behind == group], minlength=parts)
            self._expected[group] += here.sum(0)
            self._covariance[group] += np.diag(here.sum(0)) - here.T @ here
        self.tokens += len(tokens)

    def fit(self, level: float, away: float = 0.02) -> Fit:
        """Test the counts.

        Args:
            level: odds of a false alarm.
            away: the total variation that ``Fit.power`` is about.
        """
        from scipy import stats

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
        p = 0.0 if self._impossible else float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
        # By Cauchy and Schwarz d' C^-1 d >= (s'd)^2 / (s'C s) for the signs s of d, and s'd is twice the distance.
        shift = (2 * away * count) ** 2 / widest if widest else 0.0
        power = chance_to_see(shift, freedom, level)
        return Fit(self.tokens, statistic, freedom, p, distance / count, noise / count, power, away, level)

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
    from scipy import stats

    return float(stats.ncx2.sf(stats.chi2.isf(level, freedom), freedom, shift)) if freedom and shift else 0.0


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
