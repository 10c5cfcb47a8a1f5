"""The coupled rule: a token is a function of (seed, request, position) and the target's distribution, of nothing else.

The token at a position is the argmax of log p + g with the Gumbel noise g of that position: a draw from p. A drafter
that proposes the top of log q + g with the same g is right when q is near p (arXiv 2408.07978, section 4). The
text does not depend on the proposal: it is the same for every drafter, gamma, tree, pruning and batch.
"""

from __future__ import annotations

from sakiyomi.core.tree import Draft, Verdict
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.verifiers.base import Rows, Rule, Verifier
from sakiyomi.sampling.verifiers.greedy import follow


class CoupledVerifier(Verifier):
    """Accepts the longest path of the target's noisy choices, of every kind of draft; reads no draft probabilities."""

    name = "coupled"
    rule: Rule = "coupled"

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        """See ``Verifier.verify``."""
        # The key is the depth in the tree, never the row: rows of one depth are alternatives for one position.
        return follow(
            draft, lambda row, depth: noise.top(rows.position + depth, rows.row(row), support=rows.support(row))[0]
        )
