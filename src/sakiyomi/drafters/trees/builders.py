"""The shapes of trees: a path, the best nodes, a fixed number of places a level, and fixed shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

from sakiyomi.drafters.trees.base import LISTED, Builder, CandidateTree, FixedBuilder, Shape
from sakiyomi.theory import best_tree

LEVELS = 4  # of a best-first tree that are counted at full width; most are narrow
Path = tuple[int, ...]
Chances = tuple[float, ...] | tuple[tuple[float, ...], ...]


@lru_cache(maxsize=64)
def _children(paths: tuple[Path, ...]) -> Mapping[Path, int]:
    """Children of each place of a tree that has any; a place is named by the ranks on the way to it."""
    return Counter(path[:-1] for path in paths)


@lru_cache(maxsize=64)
def _best_children(ranks: Chances, nodes: int, depth: int) -> Mapping[Path, int]:
    return _children(tuple(best_tree(ranks, nodes, depth)))


class Chain(Builder):
    """The classic draft of Leviathan et al. 2023 (arXiv 2211.17192): as many passes as tokens."""

    def candidate_count(self, tree: CandidateTree, place: int) -> int:
        """See ``Builder.candidate_count``."""
        return 1

    def shape(self, depth: int, nodes: int) -> Shape:
        """See ``Builder.shape``."""
        return Shape("chain", 1, depth - 1)


class BestFirst(Builder):
    """Of all trees with so many nodes and levels the one with the most expected accepted tokens.

    These are the nodes of largest value. Values fall along a path, so the best nodes are a tree. A node of the final
    tree is among the best known candidates at any earlier time, so only these are read at each level. One pass a level
    gives the same tree as growing it node by node. Ranking by the draft's own confidence follows EAGLE-2 (arXiv
    2406.16858, section 4).
    """

    picks = True

    def candidate_count(self, tree: CandidateTree, place: int) -> int:
        """See ``Builder.candidate_count``."""
        return min(LISTED, tree.nodes)

    def expand(self, tree: CandidateTree) -> list[int]:
        """See ``Builder.expand``."""
        best = tree.best(tree.nodes)
        if len(best) == tree.nodes:
            tree.floor = max(tree.floor, tree.values[best[-1]])
        found = set(best)
        return [candidate for candidate in tree.level if candidate in found]

    def shape(self, depth: int, nodes: int) -> Shape:
        """See ``Builder.shape``."""
        return Shape("best-first", nodes, max(depth, nodes * min(depth, LEVELS)))


class DDTree(BestFirst):
    """Of all trees with so many nodes the one of largest products of the draft's own probabilities.

    Source: DDTree (arXiv 2604.12989, section 3), for drafts whose tokens come in one pass, where a heap finds it (see
    ``slot_tree.py``). ``BestFirst`` uses chances that are corrected by the acceptance so far and lists few candidates
    of a place; here a place may have as many as the tree has nodes.
    """

    calibrated: ClassVar[bool] = False

    def candidate_count(self, tree: CandidateTree, place: int) -> int:
        """See ``Builder.candidate_count``."""
        return tree.nodes

    def shape(self, depth: int, nodes: int) -> Shape:
        """See ``Builder.shape``; levels are wide, for every place has as many candidates as the tree has nodes."""
        return Shape("ddtree", nodes, nodes * (depth - 1))


class Dynamic(Builder):
    """The two steps of EAGLE-2 (arXiv 2406.16858, section 4.1): expand the best k of a level, then rank all candidates.

    Args:
        width: k, the places read at each level: a draft pass never has more rows than this for a request.
    """

    picks = True

    def __init__(self, width: int = 4) -> None:
        self.width = width

    def candidate_count(self, tree: CandidateTree, place: int) -> int:
        """See ``Builder.candidate_count``."""
        return min(LISTED, tree.nodes)

    def expand(self, tree: CandidateTree) -> list[int]:
        """See ``Builder.expand``."""
        best = sorted(tree.level, key=tree.values.__getitem__, reverse=True)
        return sorted(best[: self.width])

    def shape(self, depth: int, nodes: int) -> Shape:
        """See ``Builder.shape``."""
        return Shape("dynamic", self.width, self.width * depth)


class Choices(FixedBuilder):
    """The tree of these nodes.

    Args:
        paths: ranks on the way to each node; siblings have the ranks from 0 on (``SamplingParams.choices``).
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)

    def children(self, depth: int, nodes: int) -> Mapping[Path, int]:
        """See ``FixedBuilder.children``; of fewer nodes, where others share the round, the first ones."""
        return _children(self._paths[:nodes])


class Static(FixedBuilder):
    """Sequoia's trees (arXiv 2402.12374, section 3.1), which for one vector of chances are Medusa's greedy ones too.

    The ratio rule needs them: a drawn node must not be dropped for its value, so the shape of a drawn tree has to be
    known in advance.

    Args:
        ranks: chance that the first, second, ... candidate of a place is the one that the target chooses; a list of
            such lists has one for each level.
    """

    def __init__(self, ranks: Sequence[float] | Sequence[Sequence[float]]) -> None:
        self.ranks: Chances = tuple(tuple(level) if isinstance(level, Sequence) else level for level in ranks)  # type: ignore[assignment]

    def children(self, depth: int, nodes: int) -> Mapping[Path, int]:
        """See ``FixedBuilder.children``."""
        return _best_children(self.ranks, nodes, depth)
