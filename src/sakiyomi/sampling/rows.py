"""Selecting and drawing from one row of V numbers without a sort of V: on a CPU much of a round's time is spent here.

All functions work on one row, (V,) float32 as a numpy array: with the compiled kernels where they are loaded, else with
numpy, whose comparisons and maxima of such a row take a few microseconds where torch's take tens. Rows are never
batched, so that a row's result does not depend on what else was scored with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from sakiyomi.kernels.build import loaded

Row = NDArray[np.float32]
Tokens = NDArray[np.intp]

# Columns of the reshaped row whose maxima bound the k-th largest value.
_COLUMNS = 1000
_NO_WEIGHT = "a token is to be drawn, but no weight is positive, or one is not a number"


def as_row(values: torch.Tensor) -> Row:
    """One row of any float type on any device as (V,) float32 in numpy; no copy if it is that already."""
    if values.requires_grad:
        values = values.detach()
    row: Row = (values if values.is_cpu else values.cpu()).float().numpy()
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
        if whole < size:
            np.maximum(peaks[: size - whole], row[whole:], out=peaks[: size - whole])
        peaks.partition(_COLUMNS - count)
        bound = peaks[_COLUMNS - count]
    tokens: Tokens = (row >= bound).nonzero()[0]
    return tokens


def top_tokens(row: Row, count: int) -> list[int]:
    """The ``count`` tokens of largest value, largest first, the lower token first among equals."""
    tokens = largest(row, count)
    order = np.argsort(-row[tokens], kind="stable")[:count]
    return [int(token) for token in tokens[order]]


def draw(weights: Row, uniform: float, support: Tokens | None = None) -> int:
    """A token drawn in proportion to its weight: the inverse of the cumulative sum, at ``uniform``.

    Never returns a token of weight 0.

    Args:
        weights: (V,) float32, not negative; they need not sum to 1.
        uniform: in [0, 1).
        support: tokens, ascending, outside of which all weights are known to be 0.

    Raises:
        ValueError: no weight is positive, or one is not a number.
    """
    kernels = loaded()
    if kernels is None:
        return _invert(weights, uniform) if support is None else int(support[_invert(weights[support], uniform)])
    weights = np.ascontiguousarray(weights, np.float32)
    known = (None, 0) if support is None else (support.ctypes.data, support.size)
    token = int(kernels.sk_draw(weights.ctypes.data, weights.size, uniform, *known))
    if token < 0:
        raise ValueError(_NO_WEIGHT)
    return token


def _invert(weights: Row, uniform: float) -> int:
    reached = weights.astype(np.float64).cumsum()
    if not reached[-1] > 0.0:
        raise ValueError(_NO_WEIGHT)
    place = int(reached.searchsorted(uniform * reached[-1], side="right"))
    return place if place < weights.size else int(np.flatnonzero(weights)[-1])


def draw_distinct(weights: Row, count: int, uniform: Callable[[], float], support: Tokens | None = None) -> list[int]:
    """Up to ``count`` different tokens, each drawn in proportion to the weights that are left, in the order drawn.

    Fewer come back where fewer weights are positive. This is how siblings "without_replacement" are drawn; ``uniform``
    gives the next number of the drafter's stream. ``support`` is as for ``draw``.
    """
    if count == 1:
        return [draw(weights, uniform(), support)]
    left = weights.copy()
    tokens: list[int] = []
    while len(tokens) < count and left.any():
        token = draw(left, uniform(), support)
        tokens.append(token)
        left[token] = 0.0
    return tokens


def positive_part(target: Row, other: Row, least: float) -> tuple[Row, float]:
    """max(target - other, 0), normalised, as new memory, and its sum before that; below ``least`` it stays as it is.

    Args:
        target: (V,) float32.
        other: as many.
        least: a sum that is no rounding error.
    """
    target, other = (np.ascontiguousarray(row, np.float32) for row in (target, other))
    left = np.empty_like(target)
    kernels = loaded()
    if kernels is not None and target.shape == other.shape:
        places = (row.ctypes.data for row in (target, other))
        return left, float(kernels.sk_residual(*places, target.size, least, left.ctypes.data))
    np.maximum(np.subtract(target, other, out=left), 0.0, out=left)
    mass = float(left.sum(dtype=np.float64))
    if mass >= least:
        left /= mass
    return left, mass


def without(row: Row, token: int) -> Row:
    """The row, (V,) float32, without one token, normalised, as new memory; the row itself if it has no other."""
    kernels = loaded()
    if kernels is not None:
        row = np.ascontiguousarray(row, np.float32)
        left = np.empty_like(row)
        mass = kernels.sk_without(row.ctypes.data, row.size, token, left.ctypes.data)
        return left if mass > 0.0 else row
    left = row.copy()
    left[token] = 0.0
    mass = float(left.sum())
    if mass <= 0.0:
        return row
    left /= mass
    return left
