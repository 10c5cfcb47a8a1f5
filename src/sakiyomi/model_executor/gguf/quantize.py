"""Rounds numbers to the K formats of GGUF files, which the package ``gguf`` does not write.

A group of numbers becomes codes, a scale and, in Q4_K and Q5_K, a minimum: least squares under several first guesses,
the numbers weighted by their size. Groups of a block of 256 share two scales in 16 bits, of which each has a part.
The kernels (quantize.h) do so; where there are none, torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.gguf import BLOCKS
from sakiyomi.kernels.build import native

_BLOCK = 256
_GUESSES = torch.linspace(0.88, 1.06, 7).tolist()
_PIECE = 1 << 16


def quantize_k(kind: str, values: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Rows of a K format.

    Args:
        kind: one of ``K_FORMATS``.
        values: float32, (..., a multiple of 256).

    Returns:
        Its bytes, (..., bytes of a row).
    """
    blocks = values.reshape(-1, _BLOCK)
    library = native()
    if library is None:
        made = torch.cat([K_FORMATS[kind](piece) for piece in blocks.split(_PIECE // _BLOCK)])
    else:
        made = torch.empty((len(blocks), _SIZES[kind]), dtype=torch.uint8)
        given = blocks.contiguous()
        library.sk_quantize(int(kind[1]), given.data_ptr(), len(blocks), made.data_ptr())
    return made.view(*values.shape[:-1], -1).numpy()


def _q4_k(blocks: Tensor) -> Tensor:
    codes, head = _with_minimum(blocks, 15)
    return torch.cat([head, _packed(codes, 4, 32)], 1)


def _q5_k(blocks: Tensor) -> Tensor:
    codes, head = _with_minimum(blocks, 31)
    return torch.cat([head, _packed(codes >> 4, 1, 32), _packed(codes & 15, 4, 32)], 1)


def _q6_k(blocks: Tensor) -> Tensor:
    groups = blocks.unflatten(1, (16, 16))
    scales = _best(groups, _signed_guesses(groups, 32), -32, 31)
    whole = _half(scales.abs().amax(1) / 127)
    parts = _divided(scales, whole[:, None]).round().clamp(-128, 127)
    steps = (whole[:, None] * parts)[..., None]
    codes = ((groups * _inverse(steps)).round().clamp(-32, 31) + 32).to(torch.uint8).flatten(1)
    factors = parts.to(torch.int8).view(torch.uint8)
    return torch.cat([_packed(codes & 15, 4, 64), _packed(codes >> 4, 2, 32), factors, _bytes(whole)], 1)


K_FORMATS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
"""Blocks of 256 numbers, float32 (N, 256), to their bytes, uint8 (N, bytes), by torch."""
_SIZES = {name: width for name, block, width in BLOCKS.values() if block == _BLOCK}


# ---------------------------------------------------------------- fitting


def _with_minimum(blocks: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Codes (N, 256) up to ``most`` and the bytes of scales, minimums and their parts, of groups of 32."""
    groups = blocks.unflatten(1, (8, 32))
    scales, lows = _fitted(groups, most)
    whole, whole_low = _half(scales.amax(1) / 63), _half(lows.amax(1) / 63)
    parts = _divided(scales, whole[:, None]).round().clamp(0, 63).to(torch.uint8)
    low_parts = _divided(lows, whole_low[:, None]).round().clamp(0, 63).to(torch.uint8)
    steps, below = whole[:, None] * parts, whole_low[:, None] * low_parts
    codes = ((groups + below[..., None]) * _inverse(steps[..., None])).round().clamp(0, most).to(torch.uint8).flatten(1)
    rest = (parts[:, 4:] & 15) | (low_parts[:, 4:] & 15) << 4
    first = parts[:, :4] | (parts[:, 4:] >> 4) << 6
    second = low_parts[:, :4] | (low_parts[:, 4:] >> 4) << 6
    return codes, torch.cat([_bytes(whole), _bytes(whole_low), first, second, rest], 1)


def _fitted(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales and depths below zero (N, groups) with the least weighted error."""
    weights = groups.abs() + groups.square().mean(-1, keepdim=True).sqrt()
    low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True)
    best = torch.full(groups.shape[:-1], torch.inf)
    scales, lows = torch.zeros_like(best), torch.zeros_like(best)
    for guess in _GUESSES:
        step = (high - low) / most * guess
        codes = ((groups - low) * _inverse(step)).round().clamp(0, most)
        total, sum_x = weights.sum(-1), (weights * groups).sum(-1)
        sum_q, sum_qq = (weights * codes).sum(-1), (weights * codes * codes).sum(-1)
        sum_qx = (weights * codes * groups).sum(-1)
        scale = _divided(total * sum_qx - sum_q * sum_x, total * sum_qq - sum_q * sum_q)
        depth = _divided(scale * sum_q - sum_x, total)
        alone = _divided(sum_qx, sum_qq)  # where the minimum would be above zero
        scale, depth = torch.where(depth < 0, alone, scale).clamp_min(0), depth.clamp_min(0)
        error = (weights * (scale[..., None] * codes - depth[..., None] - groups).square()).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales, lows = torch.where(better, scale, scales), torch.where(better, depth, lows)
    return scales, lows


def _signed_guesses(groups: Tensor, most: int) -> Sequence[Tensor]:
    """Steps at which the largest number of a group, of either sign, becomes about the largest code."""
    where = groups.abs().argmax(-1, keepdim=True)
    largest = groups.gather(-1, where)
    return [-largest / (most * guess) for guess in _GUESSES]


def _best(groups: Tensor, steps: Sequence[Tensor], least: int, most: int) -> Tensor:
    """Scales (N, groups) with the least weighted error, of codes between two numbers."""
    weights = groups.square()
    best = torch.full(groups.shape[:-1], torch.inf)
    scales = torch.zeros_like(best)
    for step in steps:
        codes = (groups * _inverse(step)).round().clamp(least, most)
        scale = _divided((weights * codes * groups).sum(-1), (weights * codes * codes).sum(-1))
        error = (weights * (scale[..., None] * codes - groups).square()).sum(-1)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
    return scales


def _divided(first: Tensor, second: Tensor) -> Tensor:
    """The quotient; 0 where the divisor is."""
    zero = second == 0
    return torch.where(zero, 0.0, first / torch.where(zero, 1.0, second))


def _inverse(numbers: Tensor) -> Tensor:
    """1 / each of them; 0 where it is 0."""
    return _divided(torch.ones(()), numbers)


# ---------------------------------------------------------------- bytes


def _half(values: Tensor) -> Tensor:
    return values.to(torch.float16).float()


def _bytes(values: Tensor) -> Tensor:
    """float32 (N), which are numbers of 16 bits, as bytes (N, 2)."""
    halves: Tensor = values.to(torch.float16)[:, None].contiguous().view(torch.uint8)
    return halves


def _packed(codes: Tensor, bits: int, chunk: int) -> Tensor:
    """Codes (N, 256) in planes: of each ``chunk`` bytes the lowest bits are the first codes."""
    planes: Tensor = codes.unflatten(1, (-1, 8 // bits, chunk))
    made = planes[:, :, 0].clone()
    for place in range(1, 8 // bits):
        made |= planes[:, :, place] << place * bits
    return made.flatten(1)
