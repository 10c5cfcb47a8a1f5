"""Temperature 0: a node is accepted if it is the target's most probable token."""

from __future__ import annotations

from collections.abc import Callable

from sakiyomi.core.tree import Draft, Verdict
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.verifiers.base import Rows, Rule, Verifier, ended


def follow(draft: Draft, choose: Callable[[int, int], int]) -> Verdict:
    """Accept nodes as long as one of the children is the token that the target chose.

    The output is the target's choices alone: the draft only decides how many of them one pass yields.

    Args:
        draft: of any kind.
        choose: the target's token from (row, depth): row 0, depth 0 follows the last committed token.
    """
    tree = draft.tree
    node, depth = -1, 0
    path: list[int] = []
    refused: list[int] = []
    while True:
        token = choose(node + 1, depth)
        for child in tree.children(node):
            if tree.tokens[child] == token:
                break
            refused.append(child)
        else:
            return ended(draft, path, token, refused)
        path.append(child)
        node = child
        depth += 1


class GreedyVerifier(Verifier):
    """Accepts the longest path of most probable tokens, of every kind of draft; needs no distribution and no noise."""

    name = "greedy"
    rule: Rule = "greedy"

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        """See ``Verifier.verify``."""
        return follow(draft, lambda row, depth: rows.best(row))
