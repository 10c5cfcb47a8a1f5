"""The nodes with the largest chance of being accepted, wherever they stand."""

from __future__ import annotations

from sakiyomi.drafters.trees.base import Growth

__all__ = ["LISTED", "BestFirst"]

LISTED = 8
"""Candidates listed at a place: those behind them are accepted less than once in a hundred times."""


class BestFirst:
    """Of all trees with so many nodes and levels the one with the most expected accepted tokens.

    That are the nodes of largest value: values fall along a path, so that the best ones are a tree. A node of the final
    tree is among the best of the candidates known at any time before, so that a level needs to be read only where its
    candidates are among them: few passes, one a level, and the same tree as growing it node by node would give.
    The idea of ranking by the draft's own confidence is that of EAGLE-2 (arXiv 2406.16858, section 4).
    """

    picks = True

    def wanted(self, growth: Growth, place: int) -> int:
        """See ``Builder.wanted``."""
        return min(LISTED, growth.nodes)

    def expand(self, growth: Growth) -> list[int]:
        """See ``Builder.expand``."""
        best = growth.best(growth.nodes)
        if len(best) == growth.nodes:
            growth.floor = max(growth.floor, growth.values[best[-1]])
        found = set(best)
        return [candidate for candidate in growth.level if candidate in found]

    def chosen(self, growth: Growth) -> list[int]:
        """See ``Builder.chosen``."""
        return growth.best(growth.nodes)
