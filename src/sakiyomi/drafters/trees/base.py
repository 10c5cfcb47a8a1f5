"""A token tree while it grows, and the interface of builders, which decide its shape.

Builders only see chances; they do not depend on models, tokens or acceptance rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

from sakiyomi.core.tree import best_nodes

LISTED = 8
"""Candidates listed at a place; further ones are accepted in less than 1 % of cases."""


@dataclass(slots=True)
class CandidateTree:
    """Candidates of one tree, in the order in which the draft offered them; parents come before children.

    Attributes:
        depth: most levels.
        nodes: most candidates that may become nodes.
        tokens: token of each candidate.
        parents: candidate that each continues, -1 for the last committed token.
        ranks: 0 for the first candidate of its place, 1 for the second, ...
        chances: estimated chance that the target chooses the candidate, if all above it are accepted.
        values: product of the chances along the path. The expected number of accepted tokens of a tree is the sum of
            the values of its nodes.
        floor: candidates of less value cannot become nodes and are not kept.
        level: candidates of the last level, which no draft pass has read yet.
        levels: number of levels.
    """

    depth: int
    nodes: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    floor: float = 0.0
    level: list[int] = field(default_factory=list)
    levels: int = 0

    def begin_level(self) -> None:
        """Begin the next level."""
        self.level = []
        self.levels += 1

    def offer(self, place: int, tokens: Sequence[int], chances: Sequence[float]) -> int:
        """Add candidates of a place, the likeliest first; returns how many of them are kept.

        Args:
            place: the candidate that they continue, -1 for the last committed token.
            tokens: different ones.
            chances: as many.
        """
        above = 1.0 if place < 0 else self.values[place]
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            value = above * chance
            if value < self.floor:
                return rank
            self.level.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(place)
            self.ranks.append(rank)
            self.chances.append(chance)
            self.values.append(value)
        return len(tokens)

    def path(self, place: int) -> list[int]:
        """Candidates from the last committed token (-1, the empty path) down to a candidate, itself included."""
        found: list[int] = []
        while place >= 0:
            found.append(place)
            place = self.parents[place]
        return found[::-1]

    def rank_path(self, place: int) -> tuple[int, ...]:
        """Ranks of the candidates on the path to a candidate."""
        return tuple(self.ranks[candidate] for candidate in self.path(place))

    def best(self, count: int) -> list[int]:
        """The ``count`` candidates of largest value, best first; a candidate comes behind those above it."""
        return best_nodes(self.values, count)


class Shape(NamedTuple):
    """What a builder does, for the compiled kernels (`kernels/growth.h`).

    Attributes:
        kind: which places of a level are read: that of the first candidate; those among the best of the whole tree, by
            corrected chances or by the draft's own; the best of the level; those that have children.
        width: places that are read of a level, at most.
        rows: candidates that are read of all levels, at most.
        children: of a fixed shape, whose nodes are numbered level by level, 0 the last committed token: the first child
            of each node, and of one node more.
    """

    kind: Literal["chain", "best-first", "ddtree", "dynamic", "fixed"]
    width: int
    rows: int
    children: tuple[int, ...] = ()


class Builder(ABC):
    """Decides the shape of a tree that a draft model reads level by level, one pass for each.

    Attributes:
        picks: nodes are picked by value from all candidates, so candidates of little value may be dropped at any time.
        calibrated: chances are corrected by the acceptance so far; False: they are the draft's own probabilities.
    """

    picks: ClassVar[bool] = False
    calibrated: ClassVar[bool] = True

    @abstractmethod
    def candidate_count(self, tree: CandidateTree, place: int) -> int:
        """How many candidates the draft should list for a place, ``tree.nodes`` at most; 0: none."""

    @abstractmethod
    def shape(self, depth: int, nodes: int) -> Shape | None:
        """The shape of a tree of so many levels and nodes for the kernels; None: they cannot grow it."""

    def expand(self, tree: CandidateTree) -> list[int]:
        """Candidates of the last level that the draft reads next, ascending; empty: the tree is as deep as it gets.

        By default all that have candidates of their own.
        """
        return [candidate for candidate in tree.level if self.candidate_count(tree, candidate)]

    def chosen(self, tree: CandidateTree) -> list[int]:
        """Candidates that become nodes, none before its parent; ``tree.nodes`` at most.

        By default the first ones, or with ``picks`` the most valuable, best first.
        """
        return tree.best(tree.nodes) if self.picks else list(range(len(tree.tokens)))[: tree.nodes]


class FixedBuilder(Builder):
    """A shape that does not depend on what is drafted."""

    @abstractmethod
    def children(self, depth: int, nodes: int) -> Mapping[tuple[int, ...], int]:
        """How many children each place has that has any; a place is named by the ranks on the way to it."""

    def candidate_count(self, tree: CandidateTree, place: int) -> int:
        """See ``Builder.candidate_count``."""
        return self.children(tree.depth, tree.nodes).get(tree.rank_path(place), 0)

    def shape(self, depth: int, nodes: int) -> Shape:
        """See ``Builder.shape``."""
        return _fixed(tuple(self.children(depth, nodes).items()))


@lru_cache(maxsize=64)
def _fixed(counts: tuple[tuple[tuple[int, ...], int], ...]) -> Shape:
    children, first = dict(counts), [1]
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        count = children.get(path, 0)
        paths += [(*path, rank) for rank in range(count)]
        first.append(first[-1] + count)
    by_level = Counter(len(path) for path in paths if path in children)
    return Shape("fixed", max(by_level.values()), by_level.total() - 1, tuple(first))
