"""Straight lines between measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def between(points: Sequence[tuple[int, float]], at: int) -> float:
    """The value at a place: straight lines between the points, beyond the ends on as there.

    Args:
        points: (place, value), ascending, at least one.
        at: a place.
    """
    if len(points) == 1:
        return points[0][1]
    index = min(max(bisect_left(points, (at,)), 1), len(points) - 1)
    (low, a), (high, b) = points[index - 1], points[index]
    return a + (b - a) * (at - low) / (high - low)
