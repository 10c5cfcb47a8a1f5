"""Expected tokens and costs of a chain of gamma draft tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from sakiyomi.core.errors import InputError
from sakiyomi.theory.checks import cost, count, fraction, positive

# A draft that costs nothing and is often right has no best length; this is where the search ends.
_LONGEST = 100_000


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per target pass, recovered or bonus token included: (1 - alpha^(gamma + 1)) / (1 - alpha). Equation 1.

    Args:
        alpha: in [0, 1].
        gamma: 0 or more; 0 is plain generation.

    Returns:
        Between 1 and gamma + 1.
    """
    return _geometric(fraction("alpha", alpha), count("gamma", gamma, 0) + 1)


def expected_chain_tokens(alphas: Sequence[float], gamma: int) -> float:
    """The same where acceptance differs by place: 1 + sum over i of the product of the first i alphas.

    Equation 1 of Leviathan et al. without its assumption that places are alike.

    Args:
        alphas: chance that draft token i is accepted if those before it were; later tokens are taken to be as the last.
        gamma: 0 or more.

    Raises:
        InputError: there is no alpha, or one is no probability.
    """
    return 1.0 + math.fsum(accumulate(_chances(alphas, count("gamma", gamma, 0)), mul))


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Expected improvement of wall-clock time: tokens per pass / (gamma c + 1). Theorem 3.8.

    It takes scoring gamma + 1 tokens to cost as much as one; ``marginal_gamma`` takes a measured curve instead.

    Args:
        alpha: in [0, 1].
        gamma: 0 or more.
        c: time of a draft step / time of a target step, 0 or more.
    """
    return expected_tokens(alpha, gamma) / (gamma * cost("c", c) + 1.0)


def round_speedup(tokens: float, draft: float, verify: float, overhead: float = 0.0) -> float:
    """``speedup`` of any draft, chain or tree, with what its round really costs: tokens / (draft + verify + overhead).

    Theorem 3.8 with a pass over many rows that costs more than one over one row: in its proof the target's part of a
    round is one step.

    Args:
        tokens: expected per round, recovered or bonus token included.
        draft: time of all draft steps of the round, in plain target steps.
        verify: time of the pass that scores them, in plain target steps. Of a batch of b requests, each with a chain of
            gamma, v(b (gamma + 1)) / v(b).
        overhead: other time of the round, in plain target steps.

    Raises:
        InputError: an argument outside its range.
    """
    if not tokens >= 1.0:
        raise InputError(f"tokens is {tokens!r}; a round commits at least one")
    return tokens / (cost("draft", draft) + positive("verify", verify, "a time") + cost("overhead", overhead))


def operations_ratio(alpha: float, gamma: int, c_hat: float) -> float:
    """Expected factor of arithmetic operations per token: (gamma c_hat + gamma + 1) / tokens per pass. Theorem 3.11.

    Args:
        alpha: in [0, 1].
        gamma: 0 or more.
        c_hat: operations of a draft step / operations of a target step, 0 or more.
    """
    return (gamma * cost("c_hat", c_hat) + gamma + 1.0) / expected_tokens(alpha, gamma)


def optimal_gamma(alpha: float, c: float) -> int:
    """The gamma with the largest ``speedup``; 0 where no draft is faster (alpha <= c, corollary 3.9). Section 3.5.

    The speed-up has one maximum over gamma: it grows as long as one more draft token adds more tokens per unit of time
    than the round has on average.

    Args:
        alpha: in [0, 1).
        c: 0 or more; above 0 if alpha is 1.

    Raises:
        InputError: a draft that is free, or always right and cheaper than the target, has no best length.
    """
    fraction("alpha", alpha)
    cost("c", c)
    if alpha <= c:
        return 0
    if c == 0.0 or alpha == 1.0:
        raise InputError(
            f"alpha {alpha:g} and c {c:g} have no best gamma: every further draft token makes it faster; "
            "give an alpha below 1 and a c above 0"
        )
    gamma, gain, expected = 0, alpha, 1.0
    while gamma < _LONGEST and gain * (gamma * c + 1.0) > c * expected:
        expected += gain
        gain *= alpha
        gamma += 1
    return gamma


def marginal_gamma(
    alphas: Sequence[float], c: float, verify: Callable[[int], float], overhead: float, max_gamma: int
) -> tuple[int, float]:
    """Best gamma with acceptance measured by position and a scoring cost that grows with the tokens scored.

    The speed-up of gamma is E / (gamma c + verify(gamma + 1) + overhead), E = 1 + sum over i of the product of the
    first i alphas. All gammas are compared: a measured curve has steps (the second token of a float32 pass on a CPU
    costs more than the next four), so that the first maximum need not be the largest.

    Args:
        alphas: chance that draft token i is accepted if those before it were; later tokens are taken to be as the last.
        c: time of a draft step in plain target steps.
        verify: time of a pass over T tokens in plain target steps, verify(1) = 1.
        overhead: other time a round, in plain target steps.
        max_gamma: largest gamma to consider, 0 or more.

    Returns:
        (gamma, speed-up); (0, 1.0) where plain generation is at least as fast.

    Raises:
        InputError: an argument outside its range.
    """
    cost("c", c)
    cost("overhead", overhead)
    chances = _chances(alphas, count("max_gamma", max_gamma, 0))
    best, fastest = 0, 1.0
    expected = 1.0
    for gamma, reached in enumerate(accumulate(chances, mul), start=1):
        expected += reached
        speed = expected / (gamma * c + cost("verify", verify(gamma + 1)) + overhead)
        if speed > fastest:
            best, fastest = gamma, speed
    return best, fastest


def _chances(alphas: Sequence[float], gamma: int) -> list[float]:
    """Acceptance of the first gamma places."""
    if not alphas:
        raise InputError("alphas is empty; give the acceptance of at least the first draft token")
    chances = [fraction("alphas", alpha) for alpha in alphas]
    return (chances + [chances[-1]] * (gamma - len(chances)))[:gamma]


def _geometric(ratio: float, terms: int) -> float:
    """1 + ratio + ratio^2 + ..., ``terms`` of them, without cancellation where the ratio is near 1."""
    if ratio == 1.0:
        return float(terms)
    if ratio == 0.0 or terms == 1:
        return 1.0
    return math.expm1(terms * math.log(ratio)) / (ratio - 1.0)
