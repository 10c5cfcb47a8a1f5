"""One path: at every place the draft's first choice."""

from __future__ import annotations

from sakiyomi.drafters.trees.base import Growth

__all__ = ["Chain"]


class Chain:
    """The classic draft of Leviathan et al. 2023 (arXiv 2211.17192): as many passes as tokens."""

    picks = False

    def wanted(self, growth: Growth, place: int) -> int:
        """See ``Builder.wanted``."""
        return 1

    def expand(self, growth: Growth) -> list[int]:
        """See ``Builder.expand``."""
        return growth.level[:1]

    def chosen(self, growth: Growth) -> list[int]:
        """See ``Builder.chosen``."""
        return [i for i, rank in enumerate(growth.ranks) if rank == 0][: growth.nodes]
