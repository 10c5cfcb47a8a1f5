"""The nodes of largest probability by the draft alone."""

from __future__ import annotations

from typing import ClassVar

from sakiyomi.drafters.trees.base import CandidateTree, Shape
from sakiyomi.drafters.trees.best_first import BestFirst

__all__ = ["DDTree"]


class DDTree(BestFirst):
    """Of all trees with so many nodes the one of largest products of the draft's own probabilities.

    Source: DDTree (arXiv 2604.12989, section 3), for drafts whose tokens come in one pass, where a heap finds it (see
    ``slot_tree.py``). ``BestFirst`` takes chances that what was accepted so far has corrected, and lists a few
    candidates of a place; here there may be as many as nodes.
    """

    calibrated: ClassVar[bool] = False

    def candidate_count(self, tree: CandidateTree, place: int) -> int:
        """See ``Builder.candidate_count``."""
        return tree.nodes

    def shape(self, depth: int, nodes: int) -> Shape:
        """See ``Builder.shape``; levels are wide, for every place has as many candidates as the tree has nodes."""
        return Shape("ddtree", nodes, nodes * (depth - 1))
