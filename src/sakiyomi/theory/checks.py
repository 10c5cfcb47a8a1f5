"""Checks of arguments of the closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sakiyomi.core.errors import InputError


def distribution(name: str, values: Sequence[float]) -> list[float]:
    """Check that values are a distribution: none negative, sum 1."""
    row = [float(value) for value in values]
    total = math.fsum(row)
    # Rows computed in float32 are off by this much.
    if not row or not all(value >= 0.0 for value in row) or not abs(total - 1.0) <= 1e-4:
        raise InputError(
            f"{name} has {len(row)} entries with sum {total:g}; expected a distribution: none negative, sum 1"
        )
    return row


def fraction(name: str, value: float) -> float:
    """Check that a value is a probability."""
    if not 0.0 <= value <= 1.0:
        raise InputError(f"{name} is {value!r}; it is a probability, between 0 and 1")
    return float(value)


def cost(name: str, value: float) -> float:
    """Check a time, or a number of operations, in units of the target's."""
    if not 0.0 <= value < math.inf:
        raise InputError(f"{name} is {value!r}; it is a cost relative to the target's, 0 or more")
    return float(value)


def count(name: str, value: int, low: int) -> int:
    """Check that a value is an integer of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{name} is {value!r}; expected an integer of at least {low}")
    return value


def positive(name: str, value: float, what: str) -> float:
    """Check that a value is above 0."""
    if not 0.0 < value < math.inf:
        raise InputError(f"{name} is {value!r}; expected {what}, above 0")
    return float(value)
