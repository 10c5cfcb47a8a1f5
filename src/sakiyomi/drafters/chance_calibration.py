"""Calibrates the chances that a drafter claims by what the target then accepted.

Drafters estimate chances in different ways: from frequencies in a text, or from the softmax of a small model. They have
to be comparable before nodes of several drafters share a tree.
"""

from __future__ import annotations

from bisect import bisect_right

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_WEIGHT = 6.0  # weight of the claim itself, in nodes
_MEMORY = 0.995
_MOST = 0.995


class ChanceCalibration:
    """Chance of acceptance by claimed chance, in bins: the ratio of the accepted share to the claimed one.

    Source: histogram binning, Zadrozny and Elkan 2001, with the claim itself as prior; older nodes count less and less.
    """

    __slots__ = ("_claimed", "_kept")

    def __init__(self) -> None:
        # Start as if `_WEIGHT` nodes of each bin had been accepted as often as claimed.
        middles = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
        self._claimed = [_WEIGHT * middle for middle in middles]
        self._kept = list(self._claimed)

    def chance(self, claimed: float) -> float:
        """The calibrated chance of a node with this claimed chance."""
        bin_ = bisect_right(_EDGES, claimed)
        return min(_MOST, claimed * self._kept[bin_] / self._claimed[bin_])

    def learn(self, claimed: float, kept: bool) -> None:
        """Learn whether the target accepted a node whose parent was accepted."""
        bin_ = bisect_right(_EDGES, claimed)
        # Both fade at the same rate, so the ratio stays until other outcomes are seen.
        self._claimed[bin_] = self._claimed[bin_] * _MEMORY + claimed
        self._kept[bin_] = self._kept[bin_] * _MEMORY + kept
