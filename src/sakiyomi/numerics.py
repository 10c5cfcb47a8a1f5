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

__all__ = [
    "Row",
    "Tokens",
    "as_row",
    "draw",
    "draw_distinct",
    "keep_top_p",
    "largest",
    "nucleus",
    "top_tokens",
    "without_spare",
]

Row = NDArray[np.float32]
Bits = NDArray[np.int16]
Tokens = NDArray[np.intp]

# Columns of the reshaped row whose maxima bound the k-th largest value.
_COLUMNS = 1000
# Below this many values a sort is faster than any cleverness.
_SHORT = 1024
# How many values are looked at to guess where a nucleus ends; how much farther than the guess the search goes, as a
# factor and as a share of the mass.
_SAMPLE, _MARGIN, _LEEWAY = 512, 1.5, 0.004
# What a nucleus of a trained model seldom outgrows.
_NUCLEUS = 256
_BLOCK = 128


def as_row(values: torch.Tensor) -> Row:
    """One row of any float type on any device as (V,) float32 in numpy; no copy if it is that already."""
    if values.requires_grad:
        values = values.detach()
    row: Row = (values if values.is_cpu else values.cpu()).float().numpy()
    return row


def as_bits(values: torch.Tensor) -> Bits | None:
    """One bfloat16 row as integers in the order of the numbers, as far as these are positive; None for other types.

    Negative numbers are negative integers, but in reverse order. Whoever looks for large logits need not convert V of
    them: ``from_bits`` converts the few.
    """
    if values.dtype is not torch.bfloat16 or not values.is_cpu:
        return None
    bits: Bits = values.detach().view(torch.int16).numpy()
    return bits


def from_bits(bits: Bits) -> Row:
    """The float32 values of bfloat16 bits, which are their upper halves."""
    wide: Row = (bits.astype(np.int32) << 16).view(np.float32)
    return wide


def largest(row: Row | Bits, count: int) -> Tokens:
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


def nucleus(
    values: NDArray[np.floating], mass: float, total: float, ceiling: float = np.inf, held: float = 0.0
) -> tuple[float, int]:
    """Where the fewest largest values that sum to ``mass`` end.

    Args:
        values: not negative, in any order.
        mass: what they must reach.
        total: about what all values sum to; a wrong one only costs time.
        ceiling: the end is known to lie below this value ...
        held: ... because those at or above it sum to less than ``mass``, namely to this.

    Returns:
        (least, spare): keep the values >= least, but for ``spare`` of those that equal it.
    """
    if values.size > _SHORT:
        values, mass = _narrowed(values, mass, total, ceiling, held)
    order = np.sort(values)[::-1]
    reached = order.astype(np.float64).cumsum()
    last = min(int(reached.searchsorted(mass)), order.size - 1)
    least = order[last]
    return float(least), int(np.count_nonzero(order[last + 1 :] == least))


def _narrowed(
    values: NDArray[np.floating], mass: float, total: float, ceiling: float, held: float
) -> tuple[NDArray[np.floating], float]:
    """The values around the end of a nucleus, and the mass that is left for them; all of them if the guess was wrong.

    A sample says about where the end is. One sum over all values says what is missing there, or is too much, and the
    sample again how far that reaches: only the values between are worth a sort.
    """
    sample = values[:: values.size // _SAMPLE]
    sample = np.sort(sample if ceiling == np.inf else sample[sample < ceiling])[::-1]
    if not sample.size:
        return values, mass
    reached = sample.astype(np.float64).cumsum()
    # From the mass of all values to that of the sample.
    scale = float(reached[-1]) / max(total - held, 1e-30)
    goal = (mass - held) * scale
    pivot = sample[min(int(reached.searchsorted(goal)), sample.size - 1)]
    above = _mass_above(values, pivot)
    reach = (_MARGIN * abs(mass - above) + _LEEWAY * total) * scale
    if above < mass:
        low = sample[min(int(reached.searchsorted(goal + reach)), sample.size - 1)]
        window = values[((values <= pivot) & (values >= low)).nonzero()[0]]
        if above + float(window.sum(dtype=np.float64)) >= mass:
            return window, mass - above
    else:
        place = int(reached.searchsorted(goal - reach)) - 1
        high = sample[place] if place >= 0 else np.inf
        window = values[((values > pivot) & (values <= high)).nonzero()[0]]
        above -= float(window.sum(dtype=np.float64))
        if above < mass:
            return window, mass - above
    return values, mass


def _mass_above(values: NDArray[np.floating], bound: float) -> float:
    return float(torch.threshold(torch.from_numpy(values), float(bound), 0.0).sum())


def without_spare(values: NDArray[np.floating], least: float, spare: int) -> NDArray[np.bool_]:
    """Mask of what ``nucleus`` keeps. Of equal values the last ones stay, as after a stable ascending sort."""
    keep: NDArray[np.bool_] = values >= least
    if spare:
        keep[np.flatnonzero(values == least)[:spare]] = False
    return keep


def keep_top_p(row: Row, top_p: float) -> Tokens | None:
    """Set to 0 in place what is not among the fewest most probable tokens that reach ``top_p``, and renormalise.

    Args:
        row: (V,) probabilities, sum 1; changed.
        top_p: in (0, 1).

    Returns:
        The tokens that are left, ascending; None where they are too many for a list to pay.
    """
    bound, held = np.inf, 0.0
    # A row so flat that not even the largest value taken 256 times would do is not searched for them.
    if row.size <= _NUCLEUS or float(row.max()) * _NUCLEUS > top_p:
        tokens = largest(row, _NUCLEUS)
        values = row[tokens]
        held = float(values.sum(dtype=np.float64))
        if tokens.size == row.size or held >= top_p:
            keep = without_spare(values, *nucleus(values, top_p, held))
            tokens, values = tokens[keep], values[keep]
            row.fill(0.0)
            row[tokens] = values / values.sum(dtype=np.float64)
            return tokens
        bound = float(values.min())
    least, spare = nucleus(row, top_p, 1.0, bound, held)
    drop = (row == np.float32(least)).nonzero()[0][:spare] if spare else None
    flat = torch.from_numpy(row)
    torch.threshold_(flat, float(np.nextafter(np.float32(least), np.float32(-1.0))), 0.0)
    if drop is not None:
        row[drop] = 0.0
    flat /= flat.sum()
    return None


def draw(weights: Row, uniform: float, support: Tokens | None = None) -> int:
    """A token drawn in proportion to its weight: the inverse of the cumulative sum, at ``uniform``.

    Two levels, sums of blocks first: no cumulative sum over V. Never a token of weight 0, whatever the rounding.

    Args:
        weights: (V,) float32, not negative; they need not sum to 1.
        uniform: in [0, 1).
        support: tokens, ascending, outside of which all weights are known to be 0.
    """
    if support is not None:
        return int(support[_invert(weights[support], uniform)])
    if weights.size <= 8 * _BLOCK:
        return _invert(weights, uniform)
    whole = weights.size // _BLOCK * _BLOCK
    sums = np.einsum("ij->i", weights[:whole].reshape(-1, _BLOCK)).astype(np.float64)
    if whole < weights.size:
        sums = np.append(sums, weights[whole:].sum())
    reached = sums.cumsum()
    goal = uniform * float(reached[-1])
    block = int(reached.searchsorted(goal, side="right"))
    if block == reached.size:
        # Rounding put the goal behind the last block.
        block = int(np.flatnonzero(sums)[-1])
    start = block * _BLOCK
    # What the blocks before have not used up of the uniform is one again, within this block.
    rest = (goal - (float(reached[block - 1]) if block else 0.0)) / float(sums[block])
    return start + _invert(weights[start : start + _BLOCK], rest)


def _invert(weights: Row, uniform: float) -> int:
    reached = weights.astype(np.float64).cumsum()
    place = int(reached.searchsorted(uniform * reached[-1], side="right"))
    return place if place < weights.size else int(np.flatnonzero(weights)[-1])


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
