"""Turns a draft model's scores into chances of acceptance, learnt from what the target then chose.

A draft model's probabilities predict acceptance badly. A greedy target may accept the first choice far more often than
the draft's probability of it, or far less often. One number, the sharpness of the softmax, corrects most of that.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

_STEP = 0.02  # change of the sharpness by one place; it converges after some hundred places
_LEAST, _MOST = 0.2, 6.0
_WEIGHT = 20.0  # weight of the initial chances by rank, in places
_MEMORY = 0.998
_HEAVY = 1e9
RANKS = (0.7, 0.12, 0.05, 0.03, 0.02, 0.012, 0.008, 0.006)
"""Initial chances by rank, about those of a distilled draft at temperature 1."""


class Confidence:
    """Chances of a place's candidates from their scores, coverage x softmax(sharpness x scores): temperature scaling.

    Source: Guo et al. 2017 (arXiv 1706.04599), section 4.2. Here the temperature is fitted online, by a gradient step
    on the likelihood of the target's choice at each verified place. Coverage is the share of places where that choice
    was among the candidates.

    Args:
        sharpness: initial value.
        ranks: initial chances by rank.
    """

    def __init__(self, sharpness: float, ranks: Sequence[float] = RANKS) -> None:
        self.sharpness = sharpness
        self._hits = [chance * _WEIGHT for chance in ranks]
        self._places, self._covered = _WEIGHT, sum(self._hits)
        self._weight = 1.0  # of the last place; it grows so that earlier places count less

    def chances(self, scores: Sequence[float]) -> list[float]:
        """Chance of each candidate.

        Args:
            scores: log probabilities, or these with noise, the largest first.
        """
        top = scores[0]
        weights = [math.exp(self.sharpness * (score - top)) for score in scores]
        total = sum(weights) / self.coverage
        return [weight / total for weight in weights]

    @property
    def coverage(self) -> float:
        """Share of places whose candidates hold the target's choice."""
        return self._covered / self._places

    @property
    def ranks(self) -> list[float]:
        """Chance that the first, second, ... candidate is the target's choice, never increasing."""
        places = self._places
        return list(itertools.accumulate([min(hits / places, 1.0) for hits in self._hits], min))

    def learn(self, scores: Sequence[float], rank: int | None) -> None:
        """Learn what the target chose at a place.

        Args:
            scores: of the place's candidates, as they were given to ``chances``.
            rank: of the candidate that was chosen; None: none of them.
        """
        self._weight /= _MEMORY
        if self._weight > _HEAVY:
            share, self._weight = 1.0 / self._weight, 1.0
            self._hits = [hits * share for hits in self._hits]
            self._places, self._covered = self._places * share, self._covered * share
        self._places += self._weight
        if rank is None:
            return
        self._covered += self._weight
        if rank < len(self._hits):
            self._hits[rank] += self._weight
        if len(scores) > 1:
            chances = self.chances(scores)
            expected = sum(map(operator.mul, chances, scores)) / self.coverage
            self.sharpness = min(max(self.sharpness + _STEP * (scores[rank] - expected), _LEAST), _MOST)
