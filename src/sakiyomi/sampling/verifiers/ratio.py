"""Speculative sampling by the ratio rule: accept with min(1, p / q), else draw from what q left of p.

Sources: chains, Leviathan et al. 2023 (arXiv 2211.17192), sections 2.3 and A.1, and Chen et al. 2023 (2302.01318);
several independent siblings, SpecInfer (2305.09781), algorithm 2; siblings without replacement, recursive rejection
sampling (Jeon et al. 2024, 2402.14160; Sequoia, 2402.12374).
"""

from __future__ import annotations

from sakiyomi.core.tree import Draft, Verdict
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import Row, draw, positive_part, without
from sakiyomi.sampling.verifiers.base import Rows, Rule, Verifier, draft_rows, ended, source_of

# Below this mass a residual is rounding error of float32 rows, not a distribution.
LEAST_MASS = 1e-7


class RatioVerifier(Verifier):
    """Tries the children of a node in the order drawn, against what the rejected ones left of the target's row.

    A child that was chosen rather than drawn counts as drawn from a point mass: it is accepted with probability p(x),
    and its rejection removes x from p. So one loop serves chains, independent siblings, siblings without replacement
    and merged drafts; only for siblings without replacement q changes on the way.
    """

    name = "ratio"
    rule: Rule = "ratio"

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        """See ``Verifier.verify``."""
        path: list[int] = []
        refused: list[int] = []
        probs = draft_rows(draft, rows)
        place = -1
        while True:
            child, left = self._try_children(draft, place, rows.row(place + 1), probs, noise, refused)
            if child is None:
                # A new uniform, never one that decided an acceptance. The support of the target's row includes that of
                # what is left.
                return ended(draft, path, draw(left, noise.uniform(), rows.support(place + 1)), refused)
            path.append(child)
            place = child

    @staticmethod
    def _try_children(
        draft: Draft, place: int, target: Row, probs: Row | None, noise: RequestNoise, refused: list[int]
    ) -> tuple[int | None, Row]:
        """The accepted child of ``place``, or None and the distribution of the recovered token, (V,), sum about 1."""
        distinct = draft.kind == "without_replacement"
        tokens = draft.tree.tokens
        untried: Row | None = None
        for drawn in draft.draws_at(place):
            token = tokens[drawn.node]
            row = source_of(drawn, probs)
            if row is not None and untried is not None:
                row = untried
            chance = 1.0 if row is None else float(row[token])
            if chance <= 0.0:
                # It cannot have been drawn from this row; as a point mass it is still lossless.
                row, chance = None, 1.0
            if noise.uniform() * chance < float(target[token]):
                return drawn.node, target
            if drawn.node not in refused:
                refused.append(drawn.node)
            target = residual(target, row, token)
            if distinct and row is not None:
                untried = without(row, token)
        return None, target


def residual(target: Row, drawn_from: Row | None, token: int) -> Row:
    """Distribution of the token after a rejection: max(p - q, 0), normalised. Leviathan et al. 2023, section 2.3.

    Both p and q are taken after top-k and top-p; truncating the result again would change the output's distribution.

    Args:
        target: p, (V,) float32, sum 1; not changed.
        drawn_from: q, (V,) float32, sum 1; None: the token was a point mass.
        token: the rejected one.

    Returns:
        (V,) float32, sum 1, in new memory. Where almost nothing is left, p without the token: then p and q differ by
        rounding alone.
    """
    if drawn_from is None:
        return without(target, token)
    left, mass = positive_part(target, drawn_from, LEAST_MASS)
    return left if mass >= LEAST_MASS else without(target, token)
