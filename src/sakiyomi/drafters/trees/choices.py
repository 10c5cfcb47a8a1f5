"""A shape that the user gave: Medusa's ``medusa_choices``, for any draft that makes trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sakiyomi.drafters.trees.base import Builder, CandidateTree

__all__ = ["Choices"]


class Choices(Builder):
    """The tree of these nodes.

    Args:
        paths: ranks on the way to each node; siblings have the ranks from 0 on (``SamplingParams.choices``).
    """

    def __init__(self, paths: Sequence[tuple[int, ...]]) -> None:
        self._children = Counter(path[:-1] for path in paths)

    def candidate_count(self, tree: CandidateTree, place: int) -> int:
        """See ``Builder.candidate_count``."""
        return self._children[tree.rank_path(place)]
