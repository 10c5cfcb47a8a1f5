"""A shape that the user gave: Medusa's ``medusa_choices``, for any draft that makes trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sakiyomi.drafters.trees.base import Growth

__all__ = ["Choices"]


class Choices:
    """The tree of these nodes.

    Args:
        paths: ranks on the way to each node; siblings have the ranks from 0 on (``SamplingParams.choices``).
    """

    picks = False

    def __init__(self, paths: Sequence[tuple[int, ...]]) -> None:
        self._children = Counter(path[:-1] for path in paths)

    def wanted(self, growth: Growth, place: int) -> int:
        """See ``Builder.wanted``."""
        return self._children[growth.rank_path(place)]

    def expand(self, growth: Growth) -> list[int]:
        """See ``Builder.expand``."""
        return [candidate for candidate in growth.level if self.wanted(growth, candidate)]

    def chosen(self, growth: Growth) -> list[int]:
        """See ``Builder.chosen``: all of them, in the order in which they came."""
        return list(range(len(growth.tokens)))
