"""A shape that is fixed before the draft says anything, the best one for the acceptance measured by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from sakiyomi.drafters.trees.base import FixedBuilder
from sakiyomi.theory import best_tree

__all__ = ["Static"]

Ranks = tuple[int, ...]
Chances = tuple[float, ...] | tuple[tuple[float, ...], ...]


@lru_cache(maxsize=64)
def _children(ranks: Chances, nodes: int, depth: int) -> dict[Ranks, int]:
    """Children of each place of the best tree that has any; a place is named by the ranks on the way to it."""
    children: dict[Ranks, int] = {}
    for path in best_tree(ranks, nodes, depth):
        children[path[:-1]] = children.get(path[:-1], 0) + 1
    return children


class Static(FixedBuilder):
    """Sequoia's trees (arXiv 2402.12374, section 3.1), which for one vector of chances are Medusa's greedy ones too.

    The ratio rule needs them: a node that was drawn must not be dropped for its own value, so that the shape of a drawn
    tree has to be known before.

    Args:
        ranks: chance that the first, second, ... candidate of a place is the one that the target chooses; a list of
            such lists has one for each level.
    """

    def __init__(self, ranks: Sequence[float] | Sequence[Sequence[float]]) -> None:
        self.ranks: Chances = tuple(tuple(level) if isinstance(level, Sequence) else level for level in ranks)  # type: ignore[assignment]

    def children(self, depth: int, nodes: int) -> Mapping[Ranks, int]:
        """See ``FixedBuilder.children``."""
        return _children(self.ranks, nodes, depth)
