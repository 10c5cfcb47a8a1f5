"""Randomness of one request: it does not depend on other requests, on the batch, or on what was drafted.

There are two kinds. *Keyed noise* is a function of (seed, request, position, token): every caller gets the same value,
in any order and on any device. It makes the coupled rule (arXiv 2408.07978) independent of the draft. *Streams* are
sequences of uniforms for the ratio rule, one per purpose, so that drawing, accepting and drawing again never share a
number.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from sakiyomi.kernels.build import loaded
from sakiyomi.sampling.rows import Row, Tokens

Hashes = NDArray[np.uint32]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MASK32 = (1 << 32) - 1
# Odd multipliers from the integer hashes of C. Wellons (public domain).
_FIRST, _SECOND = 0x7FEB352D, 0x31848BAB
# Noise is kept as float32 of an odd 32-bit number; this scales it into (0, 1). Just below 2^-32, because the largest
# numbers round up to 2^32 and a uniform of 1 would never win, not even where it is the only one.
_SCALE = 2.0**-32 * (1 - 2.0**-24)


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014): a bijection of 64 bits in which every input bit counts."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Uniforms:
    """A stream of uniforms in [0, 1), determined by its key (64 bits): splitmix64, which needs no set-up.

    Attributes:
        counter: where it stands.
    """

    __slots__ = ("counter",)

    def __init__(self, key: int) -> None:
        self.counter = key

    def uniform(self) -> float:
        """The next one, a multiple of 2^-53."""
        value = _mix(self.counter)
        self.counter = (self.counter + _GOLDEN) & _MASK
        return (value >> 11) * 2.0**-53


class RequestNoise(Uniforms):
    """The randomness of one request, or of one sample of it; itself the verifier's stream of uniforms.

    Args:
        seed: what the user gave, or a fresh number.
        key: request index in its list, and sample index if there are several.

    Attributes:
        state: 64 bits that determine all keyed noise: equal for equal (seed, key).
    """

    __slots__ = ("_forks", "state")

    def __init__(self, seed: int, *key: int) -> None:
        state = _mix(seed & _MASK)
        for part in key:
            # Mixed into a mixed state, step by step: (1, 2), (2, 1), (1, 1) and (2, 2) are different requests.
            state = _mix(state ^ (part & _MASK))
        super().__init__(_mix(state ^ 0x5EED))
        self.state = state
        self._forks: dict[str, Uniforms] = {}

    def fork(self, name: str) -> Uniforms:
        """The stream called ``name``, for instance a drafter's; every call returns the same one."""
        stream = self._forks.get(name)
        if stream is None:
            state = self.state
            for byte in name.encode():
                state = _mix(state ^ (byte + 1))
            stream = self._forks[name] = Uniforms(state)
        return stream

    def top(self, position: int, weights: Row, count: int = 1, support: Tokens | None = None) -> list[int]:
        """Tokens with the largest log weight + Gumbel noise of this position, best first; see ``ranked``."""
        return self.ranked(position, weights, count, support)[0]

    def ranked(
        self, position: int, weights: Row, count: int = 1, support: Tokens | None = None
    ) -> tuple[list[int], list[float]]:
        """Tokens with the largest log weight + Gumbel noise of this position, best first, and these sums.

        The first is a draw from the weights; all are a draw without replacement. It is ``argmax(log p + gumbel)``: the
        winner has the largest weight / E, E = -log(1 - w) exponential and w uniform. As E >= w, the kernel takes
        logarithms only of tokens whose weight / w is at least the best known weight / E: of a handful instead of V.

        Args:
            position: absolute position of the token in the request's sequence.
            weights: (V,) float32 on the CPU, not negative, not all 0; they sum to about 1.
            count: how many; fewer come back where fewer weights are positive.
            support: tokens, ascending, outside of which all weights are known to be 0: only theirs is hashed then.

        Returns:
            (tokens, sums), as many of each.
        """
        kernels = loaded()
        if kernels is not None:
            weights, count = np.ascontiguousarray(weights, np.float32), min(count, weights.size)
            ranked, sums = (ctypes.c_int64 * count)(), (ctypes.c_double * count)()
            known = (None, 0) if support is None else (support.ctypes.data, support.size)
            row = weights.ctypes.data, weights.size, count
            found: int = kernels.sk_ranked(*row, self.state, position, *known, ranked, sums)
            return ranked[:found], sums[:found]
        some = weights.nonzero()[0] if support is None else support
        return _best(weights[some], self._noise(position, some), some, count)

    def gumbel(self, position: int, vocab_size: int) -> torch.Tensor:
        """Standard Gumbel noise of one position, (V,) float32; of a larger V the first entries are the same."""
        noise = self._noise(position, np.arange(vocab_size))
        return torch.from_numpy(-np.log(_exponential(noise)).astype(np.float32))

    def _noise(self, position: int, tokens: Tokens) -> Row:
        """Noise of some tokens, (n,) float32, unscaled."""
        key = _mix(self.state ^ (position & _MASK))
        hashed = _stir(_token_table(-(-(int(tokens[-1]) + 1) // 512) * 512)[tokens], key & _MASK32, key >> 32)
        return (hashed | np.uint32(1)).astype(np.float32)


@lru_cache(maxsize=4)
def _token_table(width: int) -> Hashes:
    """(width,) hashed token ids: they are hashed again with a key, and neighbouring ones have nothing in common."""
    return _stir(np.arange(width, dtype=np.uint32), 0, 0)


def _stir(hashed: Hashes, first: int, second: int) -> Hashes:
    """Two rounds of multiply and shift with two keys, a bijection of 32 bits."""
    hashed = (hashed ^ np.uint32(first)) * np.uint32(_FIRST)
    # The second key is added in between: keys that differ in one half only still part at once.
    hashed = ((hashed ^ (hashed >> np.uint32(15))) + np.uint32(second)) * np.uint32(_SECOND)
    return hashed ^ (hashed >> np.uint32(16))


def _exponential(noise: Row) -> NDArray[np.float64]:
    """Standard exponential variates of unscaled noise."""
    return -np.log1p(noise.astype(np.float64) * -_SCALE)


def _best(weights: Row, noise: Row, tokens: Tokens, count: int) -> tuple[list[int], list[float]]:
    scores = weights / _exponential(noise)
    order = [scores.argmax()] if count == 1 else np.argsort(-scores, kind="stable")[:count]
    best = [i for i in order if scores[i] > 0]
    return [int(tokens[i]) for i in best], [math.log(scores[i]) for i in best]
