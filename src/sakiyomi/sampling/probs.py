"""Temperature, top-k, top-p and min-p of one row: a fast form for the CPU, and a clear form that gives the same."""

from __future__ import annotations

import ctypes
import math
import struct

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.kernels.build import loaded
from sakiyomi.sampling.rows import Row, Tokens, as_row, top_tokens

# Longest list of tokens that the kernel returns, and its answer for a row that is no distribution (row.h).
_FEW, _NO_NUMBER = 1024, -2
# Below this, logits / temperature may overflow float32; above it they are what transformers computes, to the bit.
_COLD = 1e-3
_FLOAT, _INT = struct.Struct("=f"), struct.Struct("=I")
_NATIVE = (torch.float32, torch.bfloat16)
NOTHING_LEFT = (
    "no token is left to choose: every logit is -inf or not a number; loosen bad_words, logit_bias or "
    "logits_processors, or look for an overflow in the model (float16 weights?)"
)


def fill_row(logits: Tensor, out: Row, params: SamplingParams) -> Tokens | None:
    """The distribution of one row: by the compiled kernel, without a sort of V, else as ``reference_probs`` has it.

    Args:
        logits: (V,) of any float type on the CPU, processed; not changed.
        out: (V,) float32, written to.
        params: only temperature, top_k, top_p and min_p are read.

    Returns:
        The tokens of positive probability, ascending, where they are known to be few; None: take all for possible.

    Raises:
        InputError: no token is left, or the row is not a number.
    """
    if params.greedy:
        token = best_token(logits)
        out.fill(0.0)
        out[token] = 1.0
        return np.array([token])
    if logits.shape != out.shape:
        raise ValueError(f"{logits.shape[0]} logits for a row of {out.size} probabilities; they must be as many")
    kernels = _kernels(logits)
    if kernels is None:
        out[:] = as_row(reference_probs(logits[None], params)[0])
        # If one logit is NaN, so is the whole distribution.
        require_number(float(out[0]))
        return None
    support = np.empty(_FEW, np.intp)
    row = logits.data_ptr(), logits.dtype is torch.bfloat16, out.size
    warp = params.temperature, min(params.top_k, out.size), params.top_p, params.min_p
    count: int = kernels.sk_warp(*row, *warp, out.ctypes.data, support.ctypes.data)
    if count == _NO_NUMBER:
        raise InputError(NOTHING_LEFT)
    return support[:count] if count >= 0 else None


def _kernels(logits: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels if they are in use and can read this row, (V,), or these rows, (R, V)."""
    return loaded() if logits.dtype in _NATIVE and logits.is_cpu and logits.is_contiguous() else None


def chance(logits: Tensor, token: int) -> float:
    """Softmax probability of one token of a row, (V,) of any float type on the CPU, at temperature 1."""
    kernels = _kernels(logits)
    if kernels is not None:
        return float(kernels.sk_chance(logits.data_ptr(), logits.dtype is torch.bfloat16, logits.shape[0], token))
    row = logits.float()
    return math.exp(float(row[token]) - float(row.logsumexp(-1)))


def require_number(value: float) -> None:
    """Refuse a row by any entry of its softmax, or by its largest logit: if one is not a number, no token is left.

    Raises:
        InputError: it is NaN, or -inf.
    """
    if not value > -math.inf:
        raise InputError(NOTHING_LEFT)


def best_token(logits: Tensor) -> int:
    """The first largest of one row, (V,) of any float type.

    Raises:
        InputError: the row is not a number, or has no token left.
    """
    row = as_row(logits)
    token = int(row.argmax())
    # numpy takes the first NaN for the largest.
    require_number(float(row[token]))
    return token


def best(logits: Tensor) -> tuple[int, float]:
    """``best_token`` of a row on the CPU, and its ``chance``, in one pass where there is a compiled kernel.

    Raises:
        InputError: the row is not a number, or has no token left.
    """
    kernels = _kernels(logits)
    if kernels is not None:
        found: int = kernels.sk_best(logits.data_ptr(), logits.dtype is torch.bfloat16, logits.shape[0])
        if found >= 0:
            return found >> 32, float(_FLOAT.unpack(_INT.pack(found & 0xFFFFFFFF))[0])
    token = best_token(logits)
    if math.isinf(float(logits[token])):  # +inf: the other tokens have probability 0
        return token, 1.0
    return token, chance(logits, token)


def leading(logits: Tensor, count: int) -> list[tuple[list[int], list[float]]]:
    """The most probable tokens of each row with their log softmax, the likeliest first, of equal ones the lower first.

    Args:
        logits: (R, V) of any float type, on any device.
        count: how many; all of a shorter row.

    Raises:
        InputError: a row is not a number, or has no token left.
    """
    rows, vocab = logits.shape
    count = min(count, vocab)
    kernels = _kernels(logits)
    if kernels is None:
        return [_leading(as_row(row), count) for row in logits]
    tokens, found = (ctypes.c_int64 * (rows * count))(), (ctypes.c_float * (rows * count))()
    totals = (ctypes.c_double * rows)()
    read = logits.data_ptr(), logits.dtype is torch.bfloat16, vocab, rows
    kernels.sk_leading(*read, count, tokens, found, totals)
    answer = []
    for row, total in enumerate(totals):
        first, last = row * count, (row + 1) * count
        if math.isfinite(total):
            answer.append((tokens[first:last], [value - total for value in found[first:last]]))
        else:
            answer.append(_leading(as_row(logits[row]), count))
    return answer


def _leading(row: Row, count: int) -> tuple[list[int], list[float]]:
    require_number(float(row.max()))  # numpy takes a NaN for the largest
    first = top_tokens(row, count)
    if math.isinf(float(row[first[0]])):  # +inf: the other tokens have probability 0
        return first[:1], [0.0]
    total = float(row[first[0]]) + math.log(float(np.exp(row - row[first[0]]).sum(dtype=np.float64)))
    return first, [float(row[token]) - total for token in first]


def reference_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The clear form of ``Sampler.probs``, on any device, by full sorts: oracle of the fast one.

    Args:
        logits: (R, V) of any float type, processed.
        params: only temperature, top_k, top_p and min_p are read.

    Returns:
        (R, V) float32, rows sum to 1.
    """
    scores = logits.to(torch.float32)
    if params.greedy:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    if params.temperature < _COLD:
        scores = scores - scores.amax(-1, keepdim=True)
    scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[..., -1:], -torch.inf)
    if params.top_p < 1.0:
        # Ascending as in transformers, but stable: of equal tokens at the border the lower ids are dropped, there any.
        probs, order = scores.softmax(-1).sort(stable=True)
        above = probs.double().flip(-1).cumsum(-1).flip(-1) - probs
        # Dropped is what begins where the mass is already reached: the token that crosses the border stays.
        drop = above >= params.top_p
        drop[..., -1] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -torch.inf)
    if params.min_p > 0.0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)
