"""Temperature, top-k, top-p and min-p of one row: the fast way on the CPU, and the clear way that it agrees with."""

from __future__ import annotations

import ctypes
import math
import struct

import numpy as np
import torch
from torch import Tensor

from sakiyomi.errors import InputError
from sakiyomi.kernels.build import loaded
from sakiyomi.numerics import Row, Tokens, as_bits, as_row, from_bits, keep_top_p, largest, nucleus, without_spare
from sakiyomi.params import SamplingParams

__all__ = ["best", "best_token", "chance", "fill_row", "reference_probs", "require_number"]

# Below this, logits / temperature may overflow float32; above it they are what transformers computes, to the bit.
_COLD = 1e-3
_FLOAT, _INT = struct.Struct("=f"), struct.Struct("=I")
_NATIVE = (torch.float32, torch.bfloat16)
_NOTHING_LEFT = (
    "no token is left to choose: every logit is -inf or not a number; loosen bad_words, logit_bias or "
    "logits_processors, or look for an overflow in the model (float16 weights?)"
)


def fill_row(logits: Tensor, out: Row, params: SamplingParams) -> Tokens | None:
    """The distribution of one row, without a sort of V.

    Args:
        logits: (V,) of any float type, processed; not changed.
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
    # Where the vocabulary is smaller than top_k, all tokens are kept.
    if 0 < params.top_k < out.size:
        return _fill_top_k(logits, out, params)
    _softmax(logits, out, params.temperature)
    support = keep_top_p(out, params.top_p) if params.top_p < 1.0 else None
    if params.min_p > 0.0:
        support = (out >= out.max() * np.float32(params.min_p)).nonzero()[0]
        values = out[support]
        out.fill(0.0)
        out[support] = values / values.sum(dtype=np.float64)
    return support


def _kernels(logits: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels if they are in use and can read this row, (V,) on the CPU."""
    return loaded() if logits.dtype in _NATIVE and logits.stride(0) == 1 else None


def _softmax(logits: Tensor, out: Row, temperature: float) -> None:
    """softmax(logits / temperature) into ``out``, by the compiled kernel where there is one."""
    kernels = _kernels(logits)
    if kernels is not None and temperature >= _COLD:
        half = int(logits.dtype is torch.bfloat16)
        require_number(kernels.sk_softmax(logits.data_ptr(), half, out.size, temperature, out.ctypes.data))
        return
    flat = torch.from_numpy(out)
    flat.copy_(logits)
    if temperature != 1.0:
        if temperature < _COLD:
            out -= out.max()
        out /= np.float32(temperature)
    torch.softmax(flat, -1, out=flat)
    # Where the softmax of a row is not a number, all of it is not.
    require_number(float(out[0]))


def chance(logits: Tensor, token: int) -> float:
    """Softmax probability of one token of a row, (V,) of any float type on the CPU, at temperature 1."""
    kernels = _kernels(logits)
    if kernels is not None:
        half = int(logits.dtype is torch.bfloat16)
        return float(kernels.sk_chance(logits.data_ptr(), half, logits.shape[0], token))
    row = logits.float()
    return math.exp(float(row[token]) - float(row.logsumexp(-1)))


def _fill_top_k(logits: Tensor, out: Row, params: SamplingParams) -> Tokens:
    """Top-k, and what may follow it, on the few logits that are left."""
    top_k = params.top_k
    tokens, values = _large_logits(logits, top_k)
    if tokens.size > top_k:
        # As in transformers, all that equal the k-th stay.
        keep = values >= np.partition(values, -top_k)[-top_k]
        tokens, values = tokens[keep], values[keep]
    peak = values.max() if values.size else -np.inf
    if not math.isfinite(peak):
        raise InputError(_NOTHING_LEFT)
    if params.temperature < _COLD:
        values = values - peak
    if params.temperature != 1.0:
        values = values / np.float32(params.temperature)
    weights = np.exp(values.astype(np.float64) - values.max())
    if params.top_p < 1.0:
        total = float(weights.sum())
        keep = without_spare(weights, *nucleus(weights, params.top_p * total, total))
        tokens, weights = tokens[keep], weights[keep]
    if params.min_p > 0.0:
        # The largest weight is 1, so that this is the share of it.
        keep = weights >= params.min_p
        tokens, weights = tokens[keep], weights[keep]
    out.fill(0.0)
    out[tokens] = weights / weights.sum()
    return tokens


def _large_logits(logits: Tensor, count: int) -> tuple[Tokens, Row]:
    """Tokens among which are the ``count`` of largest logit, and their logits as float32."""
    bits = as_bits(logits)
    if bits is not None:
        tokens = largest(bits, count)
        values = from_bits(bits[tokens])
        # Bits are in the order of the numbers only above 0, where large logits mostly are.
        if values.min() > 0.0:
            return tokens, values
    row = as_row(logits)
    tokens = largest(row, count)
    return tokens, row[tokens]


def require_number(value: float) -> None:
    """Refuse a row by any entry of its softmax, or by its largest logit: if one is not a number, no token is left.

    Raises:
        InputError: it is NaN, or -inf.
    """
    if not value > -math.inf:
        raise InputError(_NOTHING_LEFT)


def best_token(logits: Tensor) -> int:
    """The first largest of one row, (V,) of any float type.

    Raises:
        InputError: the row is not a number, or has no token left.
    """
    bits = as_bits(logits)
    if bits is not None:
        token = int(bits.argmax())
        # 0x7F80 is infinity; what lies above is not a number.
        if 0 < bits[token] <= 0x7F80:
            return token
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
    if math.isinf(float(logits[token])):  # leaves nothing to the others
        return token, 1.0
    return token, chance(logits, token)


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
