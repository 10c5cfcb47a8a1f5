"""Drafters over a table: one for each kind of draft. They read the last token, as a table model does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cache

import numpy as np

from sakiyomi.core.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import draw_distinct, top_tokens
from statistical.harness import Propose, Table, as_probs


def from_rows(table: Table) -> Callable[[int, float], int]:
    """The token that ``draw`` gives for a row and a uniform, by bisection of sums that are made once."""
    sums = [row.astype(np.float64).cumsum().tolist() for row in table]
    return lambda last, uniform: bisect_right(sums[last], uniform * sums[last][-1])


def chain(table: Table, gamma: int) -> Propose:
    pick = from_rows(table)

    @cache
    def drawn(*tokens: int) -> Draft:
        return Draft.chain(tokens[1:], "draft", as_probs(table, list(tokens[:-1])))

    def propose(token: int, position: int, noise: RequestNoise) -> Draft:
        stream = noise.fork("draft")
        tokens = [token]
        for _ in range(gamma):
            tokens.append(pick(tokens[-1], stream.uniform()))
        return drawn(*tokens)

    return propose


def coupled_chain(table: Table, gamma: int) -> Propose:
    def propose(token: int, position: int, noise: RequestNoise) -> Draft:
        tokens = [token]
        for i in range(gamma):
            tokens += noise.top(position + i, table[tokens[-1]])
        return Draft.chain(tokens[1:], "draft")

    return propose


def _tree(
    table: Table,
    kind: DraftKind,
    branches: int,
    depth: int,
    siblings: Callable[[int, int, RequestNoise, int], list[int]],
    drawn: bool,
) -> Propose:
    """Every node is expanded; a token drawn twice from one place is one node with two draws."""

    def propose(token: int, position: int, noise: RequestNoise) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        draws: list[Draw] = []
        contexts: list[int] = []
        level = [(-1, token)]
        for step in range(depth):
            following = []
            for parent, last in level:
                row = None
                if drawn:
                    row = len(contexts)
                    contexts.append(last)
                nodes: dict[int, int] = {}
                for sibling in siblings(last, position + step, noise, branches):
                    if sibling not in nodes:
                        nodes[sibling] = len(tokens)
                        tokens.append(sibling)
                        parents.append(parent)
                        following.append((nodes[sibling], sibling))
                    draws.append(Draw(nodes[sibling], "draft", row))
            level = following
        probs = as_probs(table, contexts) if drawn else None
        return Draft(TokenTree(tuple(tokens), tuple(parents)), kind, tuple(draws), probs)

    return propose


def iid_tree(table: Table, branches: int, depth: int) -> Propose:
    pick = from_rows(table)

    def siblings(last: int, position: int, noise: RequestNoise, count: int) -> list[int]:
        stream = noise.fork("draft")
        return [pick(last, stream.uniform()) for _ in range(count)]

    return _tree(table, "iid", branches, depth, siblings, True)


def distinct_tree(table: Table, branches: int, depth: int) -> Propose:
    def siblings(last: int, position: int, noise: RequestNoise, count: int) -> list[int]:
        return draw_distinct(table[last], count, noise.fork("draft").uniform)

    return _tree(table, "without_replacement", branches, depth, siblings, True)


def point_mass_tree(table: Table, branches: int, depth: int) -> Propose:
    best = [top_tokens(row, branches) for row in table]

    def siblings(last: int, position: int, noise: RequestNoise, count: int) -> list[int]:
        return best[last]

    return _tree(table, "point_mass", branches, depth, siblings, False)


def coupled_tree(table: Table, branches: int, depth: int) -> Propose:
    def siblings(last: int, position: int, noise: RequestNoise, count: int) -> list[int]:
        return noise.top(position, table[last], count)

    return _tree(table, "point_mass", branches, depth, siblings, False)


def merged(table: Table, other: Table, depth: int) -> Propose:
    """Under each place a draw of one model, a draw of another, and a guess: two rows and a point mass."""
    pick, pick_other = from_rows(table), from_rows(other)

    def propose(token: int, position: int, noise: RequestNoise) -> Draft:
        first, second = noise.fork("first"), noise.fork("second")
        tokens: list[int] = []
        parents: list[int] = []
        draws: list[Draw] = []
        rows: list[np.ndarray] = []
        level = [(-1, token)]
        for _ in range(depth):
            following = []
            for parent, last in level:
                nodes: dict[int, int] = {}
                rows += [table[last], other[last]]
                proposals = (
                    ("first", pick(last, first.uniform()), len(rows) - 2),
                    ("second", pick_other(last, second.uniform()), len(rows) - 1),
                    ("guess", (last + 1) % len(table), None),
                )
                for name, sibling, row in proposals:
                    if sibling not in nodes:
                        nodes[sibling] = len(tokens)
                        tokens.append(sibling)
                        parents.append(parent)
                        following.append((nodes[sibling], sibling))
                    draws.append(Draw(nodes[sibling], name, row))
            level = following
        return Draft(
            TokenTree(tuple(tokens), tuple(parents)),
            "merged",
            tuple(draws),
            as_probs(np.stack(rows), list(range(len(rows)))),
        )

    return propose
