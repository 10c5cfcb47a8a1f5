"""A shape that the user gave: Medusa's ``medusa_choices``, for any draft that makes trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from sakiyomi.drafters.trees.base import FixedBuilder

__all__ = ["Choices"]


@lru_cache(maxsize=64)
def _children(paths: tuple[tuple[int, ...], ...]) -> Mapping[tuple[int, ...], int]:
    return Counter(path[:-1] for path in paths)


class Choices(FixedBuilder):
    """The tree of these nodes.

    Args:
        paths: ranks on the way to each node; siblings have the ranks from 0 on (``SamplingParams.choices``).
    """

    def __init__(self, paths: Sequence[tuple[int, ...]]) -> None:
        self._paths = tuple(paths)

    def children(self, depth: int, nodes: int) -> Mapping[tuple[int, ...], int]:
        """See ``FixedBuilder.children``; of fewer nodes, where others share the round, the first ones."""
        return _children(self._paths[:nodes])
