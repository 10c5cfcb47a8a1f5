"""Selecting and drawing from one row of V numbers without a sort of V: on a CPU these decide what a round costs.

All work on one row, (V,) float32 as a numpy array. numpy's comparisons and maxima of such a row take microseconds where
torch's take tens; torch is used where it is the faster one. Rows are never batched, so that a row's result does not
depend on what else was scored with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Row", "as_row", "draw", "draw_distinct", "keep_top_p", "largest", "nucleus", "top_tokens", "without_spare"]

Row = NDArray[np.float32]
Tokens = NDArray[np.intp]

# Columns of the reshaped row whose maxima bound the k-th largest value.
_COLUMNS = 1024
# Below this many values a sort is faster than any cleverness.
_SHORT = 1024
_NUCLEUS = 256
_BLOCK = 128


def as_row(values: torch.Tensor) -> Row:
    """One row of any float type on any device as (V,) float32 in numpy; no copy if it is that already."""
    if values.requires_grad:
        values = values.detach()
    row: Row = values.to(device="cpu", dtype=torch.float32).numpy()
    return row


def largest(row: Row, count: int) -> Tokens:
    """Tokens among which are the ``count`` largest values, ties included, in ascending order of token.

    The row is folded into columns: the count-th largest column maximum is reached by at least ``count`` values, so it
    bounds the count-th largest value from below. A few more tokens than asked for come back.
    """
    size = row.size
    if count >= size:
        return np.arange(size)
    if count > _COLUMNS // 2 or size < 4 * _COLUMNS:
        bound = np.partition(row, size - count)[size - count]
    else:
        whole = size // _COLUMNS * _COLUMNS
        peaks = row[:whole].reshape(-1, _COLUMNS).max(axis=0)
        np.maximum(peaks[: size - whole], row[whole:], out=peaks[: size - whole])
        bound = np.partition(peaks, _COLUMNS - count)[_COLUMNS - count]
    return np.flatnonzero(row >= bound)


def top_tokens(row: Row, count: int) -> list[int]:
    """The ``count`` tokens of largest value, largest first, the lower token first among equals."""
    tokens = largest(row, count)
    order = np.argsort(-row[tokens], kind="stable")[:count]
    return [int(token) for token in tokens[order]]


def nucleus(values: NDArray[np.floating], mass: float) -> tuple[float, int]:
    """Where the fewest largest values that sum to ``mass`` end.

    Args:
        values: not negative, in any order.
        mass: what they must reach.

    Returns:
        (least, spare): keep the values >= least, but for ``spare`` of those that equal it.
    """
    while values.size > _SHORT:
        # A sample says about where the end is; only what lies around it is looked at again.
        sample = np.sort(values[:: values.size // 512])[::-1]
        reached = np.cumsum(sample, dtype=np.float64)
        place = int(np.searchsorted(reached, mass / max(float(values.sum()), mass) * reached[-1]))
        high, low = sample[max(place - 32, 0)], sample[min(place + 32, sample.size - 1)]
        inside = values[(values <= high) & (values >= low)]
        above = _mass_above(values, high)
        if inside.size * 2 > values.size or not above < mass <= above + float(inside.sum(dtype=np.float64)):
            break
        values, mass = inside, mass - above
    order = np.sort(values)[::-1]
    reached = np.cumsum(order, dtype=np.float64)
    last = min(int(np.searchsorted(reached, mass)), order.size - 1)
    least = order[last]
    return float(least), int(np.count_nonzero(order[last + 1 :] == least))


def _mass_above(values: NDArray[np.floating], bound: float) -> float:
    return float(torch.nn.functional.threshold(torch.from_numpy(values), float(bound), 0.0).sum())


def without_spare(values: NDArray[np.floating], least: float, spare: int) -> NDArray[np.bool_]:
    """Mask of what ``nucleus`` keeps. Of equal values the last ones stay, as in transformers' stable ascending sort."""
    keep: NDArray[np.bool_] = values >= least
    if spare:
        keep[np.flatnonzero(values == least)[:spare]] = False
    return keep


def keep_top_p(row: Row, top_p: float) -> None:
    """Set to 0 in place what is not among the fewest most probable tokens that reach ``top_p``; not renormalised.

    Args:
        row: (V,) probabilities, sum 1.
        top_p: in (0, 1).
    """
    tokens = largest(row, _NUCLEUS)
    values = row[tokens]
    if tokens.size == row.size or float(values.sum(dtype=np.float64)) >= top_p:
        keep = without_spare(values, *nucleus(values, top_p))
        row.fill(0.0)
        row[tokens[keep]] = values[keep]
        return
    # A flat row: most tokens stay.
    least, spare = nucleus(row, top_p)
    drop = np.flatnonzero(row == np.float32(least))[:spare]
    below = float(np.nextafter(np.float32(least), np.float32(-1.0)))
    flat = torch.from_numpy(row)
    torch.nn.functional.threshold(flat, below, 0.0, inplace=True)
    row[drop] = 0.0


def draw(weights: Row, uniform: float) -> int:
    """A token drawn in proportion to its weight: the inverse of the cumulative sum, at ``uniform``.

    Two levels, sums of blocks first: no cumulative sum over V. Never a token of weight 0, whatever the rounding.

    Args:
        weights: (V,) float32, not negative; they need not sum to 1.
        uniform: in [0, 1).
    """
    size = weights.size
    start = 0
    if size > 8 * _BLOCK:
        whole = size // _BLOCK * _BLOCK
        sums = np.einsum("ij->i", weights[:whole].reshape(-1, _BLOCK))
        reached = np.cumsum(sums, dtype=np.float64)
        rest = float(weights[whole:].sum(dtype=np.float64))
        goal = uniform * (float(reached[-1]) + rest)
        block = int(reached.searchsorted(goal, side="right"))
        if block == reached.size and rest == 0.0:
            # Rounding put the goal behind the last block.
            block = int(np.flatnonzero(sums)[-1])
        start = block * _BLOCK
        goal -= float(reached[block - 1]) if block else 0.0
        weights = weights[start : start + _BLOCK] if block < reached.size else weights[whole:]
        reached = np.cumsum(weights, dtype=np.float64)
    else:
        reached = np.cumsum(weights, dtype=np.float64)
        goal = uniform * float(reached[-1])
    place = int(reached.searchsorted(goal, side="right"))
    if place >= weights.size:
        place = int(np.flatnonzero(weights)[-1])
    return start + place


def draw_distinct(weights: Row, count: int, uniform: Callable[[], float]) -> list[int]:
    """Up to ``count`` different tokens, each drawn in proportion to the weights that are left, in the order drawn.

    Fewer come back where fewer weights are positive. This is how siblings "without_replacement" are drawn; ``uniform``
    gives the next number of the drafter's stream.
    """
    left = weights.copy()
    tokens: list[int] = []
    while len(tokens) < count and left.any():
        token = draw(left, uniform())
        tokens.append(token)
        left[token] = 0.0
    return tokens
