"""The nodes with the largest chance of being accepted, wherever they stand."""

from __future__ import annotations

from sakiyomi.drafters.trees.base import CandidateTree, PickingBuilder, Shape

__all__ = ["BestFirst"]

LEVELS = 4  # most levels are narrow: rows for so many of the widest are more than a tree reads


class BestFirst(PickingBuilder):
    """Of all trees with so many nodes and levels the one with the most expected accepted tokens.

    That are the nodes of largest value: values fall along a path, so that the best ones are a tree. A node of the final
    tree is among the best of the candidates known at any time before, so that a level needs to be read only where its
    candidates are among them: few passes, one a level, and the same tree as growing it node by node would give.
    The idea of ranking by the draft's own confidence is that of EAGLE-2 (arXiv 2406.16858, section 4).
    """

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
