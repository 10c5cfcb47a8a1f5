"""One path: at every place the draft's first choice."""

from __future__ import annotations

from sakiyomi.drafters.trees.base import Builder, CandidateTree, Shape

__all__ = ["Chain"]


class Chain(Builder):
    """The classic draft of Leviathan et al. 2023 (arXiv 2211.17192): as many passes as tokens."""

    def candidate_count(self, tree: CandidateTree, place: int) -> int:
        """See ``Builder.candidate_count``."""
        return 1

    def expand(self, tree: CandidateTree) -> list[int]:
        """See ``Builder.expand``."""
        return tree.level[:1]

    def chosen(self, tree: CandidateTree) -> list[int]:
        """See ``Builder.chosen``."""
        if not any(tree.ranks):
            return list(range(min(len(tree.tokens), tree.nodes)))
        return [i for i, rank in enumerate(tree.ranks) if rank == 0][: tree.nodes]

    def shape(self, depth: int, nodes: int) -> Shape:
        """See ``Builder.shape``."""
        return Shape("chain", 1, depth - 1)
