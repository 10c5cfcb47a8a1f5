"""Another sampling rate for a sound, block by block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
BLOCK = 1 << 20
"""Old samples that are worked on at a time, and most of a block that a reader gives."""
_WIDTH = 24  # zero crossings of the filter on each side
_ROWS = 8192  # new samples that are computed at a time; all neighbours of all of them would not fit into memory


def resample(blocks: Iterable[Samples], old: int, new: int) -> Iterator[Samples]:
    """Band-limited interpolation with a windowed sinc.

    Each new sample is a sum over its neighbours, weighted by a Hann-windowed sinc below the lower Nyquist rate. The
    weights repeat: of the places between old samples there are only new / gcd(old, new).

    Args:
        blocks: samples of one channel.
        old, new: samples a second.

    Yields:
        Blocks of new samples. They do not depend on how the old ones are cut into blocks.
    """
    if old == new:
        yield from blocks
        return
    divisor = math.gcd(old, new)
    up, down = new // divisor, old // divisor
    cutoff = min(1.0, up / down) * 0.97
    half = math.ceil(_WIDTH / cutoff)
    size = max(1, BLOCK // down) * down
    offsets = np.arange(-half, half + 1)

    @functools.lru_cache(maxsize=1024)
    def weights(phase: int) -> Samples:
        distance = offsets - (phase * down % up) / up
        window = 0.5 + 0.5 * np.cos(np.pi * np.clip(distance / (half + 1), -1, 1))
        found = np.sinc(cutoff * distance) * window
        scaled: Samples = (found / found.sum()).astype(np.float32)
        return scaled

    held = np.zeros(half, np.float32)  # from half a filter before the next new sample on
    for block in blocks:
        for begin in range(0, len(block), BLOCK):
            held = np.concatenate([held, block[begin : begin + BLOCK]])
            while len(held) >= size + 2 * half:
                yield _filtered(held[: size + 2 * half], up, down, weights)
                held = held[size:]
    if len(held) > half:
        yield _filtered(np.pad(held, (0, half)), up, down, weights)


def _filtered(padded: Samples, up: int, down: int, weights: Callable[[int], Samples]) -> Samples:
    """New samples of a block that has half a filter more on each side."""
    width = len(weights(0))
    count = -(-(len(padded) - width + 1) * up // down)
    found = np.empty(count, np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    for phase in range(min(up, count)):
        rows = np.arange(phase, count, up) * down // up
        blocks = [windows[rows[i : i + _ROWS]] @ weights(phase) for i in range(0, len(rows), _ROWS)]
        found[phase::up] = np.concatenate(blocks)
    return found
