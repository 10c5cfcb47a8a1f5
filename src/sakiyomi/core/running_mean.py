"""Means of clock readings on a machine that also does other things."""

from __future__ import annotations


def running_mean(known: float | None, seconds: float) -> float:
    """The mean after another reading: much faster ones replace it, much slower ones count little."""
    if known is None or seconds < known / 2:
        return seconds
    return known + 0.1 * (min(seconds, 2 * known) - known)
