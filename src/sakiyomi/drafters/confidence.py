"""How likely drafted tokens are to be accepted: three ways to learn it from what the target chose.

- ``Confidence`` corrects the scores of a draft model. A draft model's probabilities predict acceptance badly: a greedy
  target may accept the first choice far more often than the draft's probability of it, or far less often. One number,
  the sharpness of the softmax, corrects most of that.
- ``GuessCalibration`` counts how often guesses of a kind were right in a request's own text.
- ``ChanceCalibration`` corrects the chances that a drafter claims. Drafters estimate chances in different ways; they
  have to be comparable before nodes of several drafters share a tree.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Sequence

_STEP = 0.02  # change of the sharpness by one place; it converges after some hundred places
_LEAST, _MOST = 0.2, 6.0
_WEIGHT = 20.0  # weight of the initial chances by rank, in places
_MEMORY = 0.998
_HEAVY = 1e9
RANKS = (0.7, 0.12, 0.05, 0.03, 0.02, 0.012, 0.008, 0.006)
"""Initial chances by rank, about those of a distilled draft at temperature 1."""
# Of ``ChanceCalibration``: bins by claimed chance, the weight of the claim itself in nodes, and how fast nodes fade.
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_CLAIM, _FADING = 6.0, 0.995
_HIGHEST = 0.995


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


class GuessCalibration:
    """Counts right guesses by kind, from the committed text; guesses too unsure to be proposed count too.

    Each request has its own counts, so its drafts depend on its own text alone.

    Args:
        priors: initial chance of each kind.
        weight: of the prior, in guesses.
        memory: factor by which older guesses of a kind fade with each new one.
    """

    __slots__ = ("_hits", "_memory", "_path", "_position", "_tries", "chances")

    def __init__(self, priors: Sequence[float], weight: float = 4.0, memory: float = 0.98) -> None:
        self.chances = list(priors)
        self._hits = [prior * weight for prior in priors]
        self._tries = [weight] * len(priors)
        self._memory = memory
        self._position = 0
        self._path: Sequence[tuple[int, int]] = ()

    def expect(self, position: int, path: Sequence[tuple[int, int]]) -> None:
        """Remember a guess.

        Args:
            position: of its first token in the text.
            path: kind and token, one after the other.
        """
        self._position, self._path = position, path

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the last guess with the committed text, up to the first wrong token."""
        position, known = self._position, len(tokens)
        for kind, token in self._path:
            if position >= known:
                break
            right = tokens[position] == token
            hits = self._hits[kind] = self._hits[kind] * self._memory + right
            tries = self._tries[kind] = self._tries[kind] * self._memory + 1.0
            self.chances[kind] = hits / tries
            if not right:
                break
            position += 1
        self._path = ()


class ChanceCalibration:
    """Chance of acceptance by claimed chance, in bins: the ratio of the accepted share to the claimed one.

    Source: histogram binning, Zadrozny and Elkan 2001, with the claim itself as prior; older nodes count less and less.
    """

    __slots__ = ("_claimed", "_kept")

    def __init__(self) -> None:
        # Start as if `_CLAIM` nodes of each bin had been accepted as often as claimed.
        middles = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
        self._claimed = [_CLAIM * middle for middle in middles]
        self._kept = list(self._claimed)

    def chance(self, claimed: float) -> float:
        """The calibrated chance of a node with this claimed chance."""
        bin_ = bisect_right(_EDGES, claimed)
        return min(_HIGHEST, claimed * self._kept[bin_] / self._claimed[bin_])

    def learn(self, claimed: float, kept: bool) -> None:
        """Learn whether the target accepted a node whose parent was accepted."""
        bin_ = bisect_right(_EDGES, claimed)
        # Both fade at the same rate, so the ratio stays until other outcomes are seen.
        self._claimed[bin_] = self._claimed[bin_] * _FADING + claimed
        self._kept[bin_] = self._kept[bin_] * _FADING + kept
