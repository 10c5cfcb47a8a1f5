"""Block verification: a chain is verified as a whole, so that good tokens may save a doubtful one before them.

Source: Sun et al. 2024 (arXiv 2403.10444), algorithm 2; of all lossless rules for one chain it accepts most tokens on
average (theorem 2 there).

Notation: p and q are the target's and the draft's distribution after i tokens of the chain x. The *level* of a place is
the probability with which the chain up to there is worth keeping, of its tokens alone:

    a_0 = 1,  a_i = min(1, a_{i-1} p(x_i) / q(x_i))

The longest beginning that stays is looked for from the end: the whole chain stays with a_n, and if what is longer was
refused, i tokens stay with S / (S + 1 - a_i), S = sum max(a_i p - q, 0), and the token after them comes from
max(a_i p - q, 0) / S. At i = 0 the level is 1, and the walk ends.
"""

from __future__ import annotations

import numpy as np

from sakiyomi.core.tree import Draft, DraftKind, Verdict
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import Row, draw, positive_part, without
from sakiyomi.sampling.verifiers.base import Rows, Rule, Verifier, draft_rows, ended, source_of
from sakiyomi.sampling.verifiers.ratio import LEAST_MASS


class BlockVerifier(Verifier):
    """Never accepts fewer tokens on average than the ratio rule, but also reads the rows after a rejected token.

    A chain may include point masses. Uniforms are used from the end of the chain to its beginning, one for each node
    that is verified, and none at the beginning itself.
    """

    name = "block"
    rule: Rule = "ratio"
    takes: frozenset[DraftKind] = frozenset({"chain"})

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        """See ``Verifier.verify``."""
        probs = draft_rows(draft, rows)
        levels = [1.0]
        sources: list[Row | None] = []
        for place, token in enumerate(draft.tree.tokens):
            drawn = draft.draws_at(place - 1)[0]
            sources.append(source_of(drawn, probs))
            levels.append(level_of(levels[-1], rows.row(place), sources[-1], token))
            if not levels[-1]:
                break  # no beginning with this token can be accepted
        kept = len(sources)
        if levels[kept] and kept == len(draft) and (not kept or noise.uniform() < levels[kept]):
            return ended(draft, range(kept), draw(rows.row(kept), noise.uniform(), rows.support(kept)))
        while True:
            kept -= 1
            left, level = after_refusal(levels[kept], rows.row(kept), sources[kept], draft.tree.tokens[kept])
            if not kept or noise.uniform() < level:
                return ended(draft, range(kept), draw(left, noise.uniform(), rows.support(kept)), (kept,))


def level_of(level: float, target: Row, drawn_from: Row | None, token: int) -> float:
    """Level of a node from that of its parent: min(1, level p(x) / q(x)).

    Args:
        level: of the parent.
        target: p, (V,) float32, sum 1.
        drawn_from: q, (V,) float32, sum 1; None: the token was a point mass.
        token: x.
    """
    chance = _chance(drawn_from, token)
    return min(1.0, level * float(target[token]) / chance)


def after_refusal(level: float, target: Row, drawn_from: Row | None, token: int) -> tuple[Row, float]:
    """Distribution and level of a node after a child was rejected, with all its descendants.

    Args:
        level: of the place.
        target: p, (V,) float32, sum 1; not changed.
        drawn_from: q, (V,) float32, sum 1; None: the token was a point mass.
        token: the rejected one.

    Returns:
        max(level p - q, 0) / S, (V,) float32 in new memory, and the new level, S / (S + 1 - level). Where almost
        nothing is left of p, it is p without the token: p and q then differ by rounding alone.
    """
    if drawn_from is None or drawn_from[token] <= 0.0:
        left, mass = without(target, token), level * (1.0 - float(target[token]))
    else:
        scaled = target if level == 1.0 else target * np.float32(level)
        left, mass = positive_part(scaled, drawn_from, LEAST_MASS)
        if mass < LEAST_MASS:
            left = without(target, token)
    return left, mass / (mass + 1.0 - level) if level < 1.0 else 1.0


def _chance(drawn_from: Row | None, token: int) -> float:
    """q(x). A token that its row excludes cannot be drawn from there; as a point mass it is still lossless."""
    chance = 1.0 if drawn_from is None else float(drawn_from[token])
    return chance if chance > 0.0 else 1.0
