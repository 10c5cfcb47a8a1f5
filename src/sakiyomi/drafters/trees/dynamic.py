"""A fixed number of places read at each level, then the best of all that was seen."""

from __future__ import annotations

from sakiyomi.drafters.trees.base import CandidateTree, PickingBuilder, Shape

__all__ = ["Dynamic"]


class Dynamic(PickingBuilder):
    """The two steps of EAGLE-2 (arXiv 2406.16858, section 4.1): expand the best k of a level, then rank all.

    Args:
        width: k, the places read at each level: a draft pass never has more rows than this for a request.
    """

    def __init__(self, width: int = 4) -> None:
        self.width = width

    def expand(self, tree: CandidateTree) -> list[int]:
        """See ``Builder.expand``."""
        best = sorted(tree.level, key=tree.values.__getitem__, reverse=True)
        return sorted(best[: self.width])

    def shape(self, depth: int, nodes: int) -> Shape:
        """See ``Builder.shape``."""
        return Shape("dynamic", self.width, self.width * depth)
