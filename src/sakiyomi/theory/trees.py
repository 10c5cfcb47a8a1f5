"""Trees: the most valuable nodes, and their expected tokens."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.theory.chains import round_speedup
from sakiyomi.theory.checks import cost, count, fraction


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
    count("nodes", nodes, 0)
    count("depth", depth, 1)
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


def optimal_tree(
    ranks: Sequence[float] | Sequence[Sequence[float]],
    c: float,
    verify: Callable[[int], float],
    overhead: float,
    max_nodes: int,
    max_depth: int,
) -> tuple[list[tuple[int, ...]], float]:
    """The fastest tree by what passes cost: the largest E(n, d) / (d c + v(n + 1) + overhead).

    The hardware-aware choice of Sequoia (arXiv 2402.12374, section 3.3) over all sizes n and depths d, with the best
    tree of each. A draft model reads a level in one pass.

    Args:
        ranks: as for ``best_tree``.
        c: time of a draft pass in plain target steps.
        verify: time of a target pass over T rows in plain target steps, verify(1) = 1.
        overhead: other time a round, in plain target steps.
        max_nodes, max_depth: of the trees that are considered.

    Returns:
        (nodes as paths of ranks, speed-up); ([], 1.0) where plain generation is at least as fast.

    Raises:
        InputError: an argument outside its range.
    """
    cost("c", c)
    levels = _levels(ranks, count("max_depth", max_depth, 1))
    best: list[tuple[int, ...]] = []
    fastest = 1.0
    for depth in range(1, len(levels) + 1):
        paths = best_tree(levels[:depth], count("max_nodes", max_nodes, 1), depth)
        for nodes in range(1, len(paths) + 1):
            found = expected_tree_tokens(levels, paths[:nodes])
            deepest = max(map(len, paths[:nodes]))
            speed = round_speedup(found, deepest * c, verify(nodes + 1), overhead)
            if speed > fastest:
                best, fastest = paths[:nodes], speed
    return best, fastest


def _levels(ranks: Sequence[float] | Sequence[Sequence[float]], depth: int) -> list[list[float]]:
    """Chances by rank of each level."""
    given: list[Any] = list(ranks)
    rows = given if given and not isinstance(given[0], int | float) else [given] * depth
    levels = [[fraction("ranks", chance) for chance in row] for row in rows[:depth]]
    if not levels or not all(levels):
        raise InputError(f"ranks is {given!r}; expected chances by rank, the largest first, at least one")
    return levels
