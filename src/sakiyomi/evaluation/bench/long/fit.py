"""Numbers from measured lengths: how memory grows with them, and the longest that fits. Knows no system."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["longest", "slope"]


def slope(lengths: Sequence[int], sizes: Sequence[float]) -> float | None:
    """Exponent of growth: the slope of the line through log size by log length (least squares).

    Args:
        lengths: tokens.
        sizes: bytes; those below 1 are left out, since nothing grew.

    Returns:
        0: flat, 1: linear, 2: quadratic. None where fewer than two lengths are left.
    """
    points = [(math.log(n), math.log(size)) for n, size in zip(lengths, sizes, strict=True) if size >= 1]
    if len({x for x, _ in points}) < 2:
        return None
    middle_x, middle_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    product: float = sum((x - middle_x) * (y - middle_y) for x, y in points)
    square: float = sum((x - middle_x) ** 2 for x, _ in points)
    return product / square


def longest(fits: Callable[[int], bool], below: int, *, least: int = 32, steps: int = 3) -> int | None:
    """The longest length that fits, to an eighth: halved until one does, then the gap above it halved ``steps`` times.

    Args:
        fits: tries a length.
        below: a length that does not fit.
        least: none below this is tried.
        steps: tries in the gap.

    Returns:
        A length that was seen to fit; None if none was.
    """
    good, bad = below // 2, below
    while good >= least and not fits(good):
        good, bad = good // 2, good
    if good < least:
        return None
    for _ in range(steps):
        middle = (good + bad) // 2
        if middle in (good, bad):
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
