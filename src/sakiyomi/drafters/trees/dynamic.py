"""A fixed number of places read at each level, then the best of all that was seen."""

from __future__ import annotations

from sakiyomi.drafters.trees.base import Growth
from sakiyomi.drafters.trees.best_first import LISTED

__all__ = ["Dynamic"]


class Dynamic:
    """The two steps of EAGLE-2 (arXiv 2406.16858, section 4.1): expand the best k of a level, then rank all.

    Args:
        width: k, the places read at each level: a draft pass never has more rows than this for a request.
    """

    picks = True

    def __init__(self, width: int = 4) -> None:
        self.width = width

    def wanted(self, growth: Growth, place: int) -> int:
        """See ``Builder.wanted``."""
        return min(LISTED, growth.nodes)

    def expand(self, growth: Growth) -> list[int]:
        """See ``Builder.expand``."""
        best = sorted(growth.level, key=growth.values.__getitem__, reverse=True)
        return sorted(best[: self.width])

    def chosen(self, growth: Growth) -> list[int]:
        """See ``Builder.chosen``."""
        return growth.best(growth.nodes)
