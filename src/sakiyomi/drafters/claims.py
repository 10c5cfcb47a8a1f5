"""What a drafter's word is worth: its claimed chances against what the target then took.

Drafters of different kinds count differently: a frequency in a text, a softmax of a small model. Before their nodes can
share a tree, their chances have to mean the same.
"""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Claims"]

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_WEIGHT = 6.0  # nodes that the claim itself counts for
_MEMORY = 0.995
_MOST = 0.995


class Claims:
    """Chance of acceptance by claimed chance, in bins: the ratio of what was kept to what was claimed.

    Source: histogram binning, Zadrozny and Elkan 2001, with the claim itself as prior, and a slow forgetting.
    """

    __slots__ = ("_claimed", "_kept")

    def __init__(self) -> None:
        # As if so many nodes of each bin had been kept just as often as was claimed.
        middles = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
        self._claimed = [_WEIGHT * middle for middle in middles]
        self._kept = list(self._claimed)

    def chance(self, claimed: float) -> float:
        """The calibrated chance of a node of which so much was claimed."""
        bin_ = bisect_right(_EDGES, claimed)
        return min(_MOST, claimed * self._kept[bin_] / self._claimed[bin_])

    def learn(self, claimed: float, kept: bool) -> None:
        """The target came to a node's place and took it, or did not."""
        bin_ = bisect_right(_EDGES, claimed)
        # Both fade alike: what was learnt stays until something else is seen.
        self._claimed[bin_] = self._claimed[bin_] * _MEMORY + claimed
        self._kept[bin_] = self._kept[bin_] * _MEMORY + kept
