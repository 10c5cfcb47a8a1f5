"""Closed forms of speculative decoding, in plain floats: what a draft is worth before anything is run.

alpha is the expected acceptance rate, gamma the draft tokens per round, c the time of a draft step in target steps,
c_hat its operations in those of the target. Source, if not said otherwise: Leviathan et al. 2023 (arXiv 2211.17192),
section 3.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from sakiyomi.errors import InputError

__all__ = [
    "acceptance",
    "best_tree",
    "expected_tokens",
    "expected_tree_tokens",
    "marginal_gamma",
    "operations_ratio",
    "optimal_gamma",
    "speedup",
]

# A draft that costs nothing and is often right has no best length; this is where the search ends.
_LONGEST = 100_000


def acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Probability that a token drawn from q is accepted by a target p: sum of min(p, q), which is 1 - TV(p, q).

    Section 3.2, theorem 3.5 and corollary 3.6: its mean over prefixes is alpha.

    Args:
        p: (V) the target's distribution, sum 1.
        q: (V) the draft's, over the same vocabulary.

    Returns:
        Between 0 and 1.

    Raises:
        InputError: lengths differ, or one is not a distribution.
    """
    target, draft = _distribution("p", p), _distribution("q", q)
    if len(target) != len(draft):
        raise InputError(f"p has {len(target)} entries, q {len(draft)}; expected one vocabulary")
    return min(1.0, math.fsum(map(min, target, draft)))


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per target pass, recovered or bonus token included: (1 - alpha^(gamma + 1)) / (1 - alpha). Equation 1.

    Args:
        alpha: in [0, 1].
        gamma: 0 or more; 0 is plain generation.

    Returns:
        Between 1 and gamma + 1.
    """
    return _geometric(_fraction("alpha", alpha), _count("gamma", gamma, 0) + 1)


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Expected improvement of wall-clock time: tokens per pass / (gamma c + 1). Theorem 3.8.

    It takes scoring gamma + 1 tokens to cost as much as one; ``marginal_gamma`` takes a measured curve instead.

    Args:
        alpha: in [0, 1].
        gamma: 0 or more.
        c: time of a draft step / time of a target step, 0 or more.
    """
    return expected_tokens(alpha, gamma) / (gamma * _cost("c", c) + 1.0)


def operations_ratio(alpha: float, gamma: int, c_hat: float) -> float:
    """Expected factor of arithmetic operations per token: (gamma c_hat + gamma + 1) / tokens per pass. Theorem 3.11.

    Args:
        alpha: in [0, 1].
        gamma: 0 or more.
        c_hat: operations of a draft step / operations of a target step, 0 or more.
    """
    return (gamma * _cost("c_hat", c_hat) + gamma + 1.0) / expected_tokens(alpha, gamma)


def optimal_gamma(alpha: float, c: float) -> int:
    """The gamma with the largest ``speedup``; 0 where no draft pays (alpha <= c, corollary 3.9). Section 3.5.

    The speed-up has one maximum over gamma: it grows as long as one more draft token adds more tokens per unit of time
    than the round has on average.

    Args:
        alpha: in [0, 1).
        c: 0 or more; above 0 if alpha is 1.

    Raises:
        InputError: a draft that is free, or always right and cheaper than the target, has no best length.
    """
    _fraction("alpha", alpha)
    _cost("c", c)
    if alpha <= c:
        return 0
    if c == 0.0 or alpha == 1.0:
        raise InputError(
            f"alpha {alpha:g} and c {c:g} have no best gamma: every further draft token pays; "
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
    if not alphas:
        raise InputError("alphas is empty; give the acceptance of at least the first draft token")
    chances = [_fraction("alphas", alpha) for alpha in alphas]
    _cost("c", c)
    _cost("overhead", overhead)
    _count("max_gamma", max_gamma, 0)
    chances += [chances[-1]] * (max_gamma - len(chances))
    best, fastest = 0, 1.0
    expected = 1.0
    for gamma, reached in enumerate(accumulate(chances[:max_gamma], mul), start=1):
        expected += reached
        speed = expected / (gamma * c + _cost("verify", verify(gamma + 1)) + overhead)
        if speed > fastest:
            best, fastest = gamma, speed
    return best, fastest


def best_tree(ranks: Sequence[float] | Sequence[Sequence[float]], nodes: int, depth: int) -> list[tuple[int, ...]]:
    """The tree of so many nodes and levels with the most expected tokens, where chances depend on the rank alone.

    A node is worth the product of the chances along its path, which falls from parent to child and from sibling to
    sibling, so that taking the most valuable one that can be taken, again and again, is best: the greedy rule of Medusa
    (arXiv 2401.10774, section 2.3.3) finds what Sequoia's dynamic programme over budget and depth does (2402.12374,
    section 3.1.2).

    Args:
        ranks: chance that the first, second, ... child of a place is the one that is accepted; not growing. A list of
            such lists has one for each level, as Medusa's heads have.
        nodes: 0 or more.
        depth: levels, at least 1.

    Returns:
        Nodes as paths of ranks, (0,) the root's first child, the most valuable first: any beginning of the list is the
        best tree of that many nodes.

    Raises:
        InputError: an argument outside its range.
    """
    _count("nodes", nodes, 0)
    _count("depth", depth, 1)
    levels = _levels(ranks, depth)
    for chances in levels:
        if any(first < second for first, second in itertools.pairwise(chances)):
            raise InputError(f"ranks is {list(ranks)!r}; expected chances by rank, the largest first, at least one")
    chosen: list[tuple[int, ...]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(-levels[0][0], (0,))]
    while frontier and len(chosen) < nodes:
        value, path = heapq.heappop(frontier)
        chosen.append(path)
        last, chances = path[-1], levels[len(path) - 1]
        if len(path) < len(levels):
            heapq.heappush(frontier, (value * levels[len(path)][0], (*path, 0)))
        if last + 1 < len(chances) and chances[last] > 0.0:
            heapq.heappush(frontier, (value * chances[last + 1] / chances[last], (*path[:-1], last + 1)))
    return chosen


def expected_tree_tokens(ranks: Sequence[float] | Sequence[Sequence[float]], paths: Sequence[Sequence[int]]) -> float:
    """Tokens per target pass of a tree, recovered or bonus token included: 1 + sum over nodes of its chance.

    Args:
        ranks: as for ``best_tree``.
        paths: nodes as ``best_tree`` gives them; those above a node are nodes too.
    """
    levels = _levels(ranks, max(map(len, paths), default=1))
    return 1.0 + math.fsum(
        math.prod(chances[rank] for chances, rank in zip(levels, path, strict=False)) for path in paths
    )


def _levels(ranks: Sequence[float] | Sequence[Sequence[float]], depth: int) -> list[list[float]]:
    """Chances by rank of each level."""
    given: list[Any] = list(ranks)
    rows = given if given and not isinstance(given[0], int | float) else [given] * depth
    levels = [[_fraction("ranks", chance) for chance in row] for row in rows[:depth]]
    if not levels or not all(levels):
        raise InputError(f"ranks is {given!r}; expected chances by rank, the largest first, at least one")
    return levels


def _geometric(ratio: float, terms: int) -> float:
    """1 + ratio + ratio^2 + ..., ``terms`` of them, without cancellation where the ratio is near 1."""
    if ratio == 1.0:
        return float(terms)
    if ratio == 0.0 or terms == 1:
        return 1.0
    return math.expm1(terms * math.log(ratio)) / (ratio - 1.0)


def _distribution(name: str, values: Sequence[float]) -> list[float]:
    row = [float(value) for value in values]
    total = math.fsum(row)
    # Rows computed in float32 are off by this much.
    if not row or not all(value >= 0.0 for value in row) or not abs(total - 1.0) <= 1e-4:
        raise InputError(
            f"{name} has {len(row)} entries with sum {total:g}; expected a distribution: none negative, sum 1"
        )
    return row


def _fraction(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise InputError(f"{name} is {value!r}; it is a probability, between 0 and 1")
    return float(value)


def _cost(name: str, value: float) -> float:
    if not 0.0 <= value < math.inf:
        raise InputError(f"{name} is {value!r}; it is a cost relative to the target's, 0 or more")
    return float(value)


def _count(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{name} is {value!r}; expected an integer of at least {low}")
    return value
