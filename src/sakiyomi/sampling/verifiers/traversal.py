"""Traversal verification: a tree is verified from its leaves to its root, so that every path is tried as a whole.

Source of the idea: Weng et al. 2025 (arXiv 2505.12398); of a chain it makes block verification (``block.py``, whose
notation this uses). The form here and its proof are our own; it also takes point masses, several drafters, and nodes
that several draws share.

A place (the root, or a node) has a level a, which says how likely the path to it may stay, and a distribution p, at
first the target's row there. To *judge a place*: if it has a draw x from q that was not tried, judge the place x with
level min(1, a p(x) / q(x)); if that refuses, stay here with p' = max(a p - q, 0) / S and a' = S / (S + 1 - a), where S
is the sum of max(a p - q, 0). If none is left, the path to here stays with probability a and the next token comes from
p; else the place refuses. The root has level 1 and keeps it.

Lossless, by induction over draws, the last one first. Claim: judging a place of level a ends with a text that continues
from it with probability a, and this text is one of p's. Without a draw that is so by definition. With one, x drawn from
q, the place x keeps its text, by the claim, with min(1, a p(x) / q(x)): so texts that continue with token z come up
with min(q(z), a p(z)) from there. It refuses with 1 - sum min(q, a p) = S + 1 - a, and what follows then gives z with
a' p'(z): together with min(q(z), a p(z)) + max(a p(z) - q(z), 0) = a p(z). Nothing in this depends on which draws hang
elsewhere: whether and where another token is drawn may depend on all that was drawn before it, never on its own value.

A node may have several draws. x is refused only where a p(x) < q(x), and then p'(x) = 0: its second draw has level 0,
so that no subtree is judged twice, but its q is taken from p as any other's.
"""

from __future__ import annotations

import numpy as np

from sakiyomi.core.tree import Draft, Draw, Verdict
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import Row, draw, positive_part, without
from sakiyomi.sampling.verifiers.base import Rows, Rule, Verifier, draft_rows, ended, source_of
from sakiyomi.sampling.verifiers.ratio import LEAST_MASS


class _Place:
    """A node on the path that is tried, or the root (-1).

    Attributes:
        level: probability with which the path to here may be accepted.
        draws: of its children; the first ``tried`` of them have been judged or are being judged.
        target: p, (V,); None until it is needed.
        untried: q of siblings without replacement, once one was rejected.
        source: q of the draw that is being judged.
    """

    __slots__ = ("draws", "level", "node", "source", "target", "tried", "untried")

    def __init__(self, node: int, level: float, draws: tuple[Draw, ...]) -> None:
        self.node, self.level, self.draws = node, level, draws
        self.tried = 0
        self.target: Row | None = None
        self.untried: Row | None = None
        self.source: Row | None = None


class TraversalVerifier(Verifier):
    """Judges every leaf before its parent; on the way up, what was rejected is removed from p."""

    name = "traversal"
    rule: Rule = "ratio"

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        """See ``Verifier.verify``."""
        probs = draft_rows(draft, rows)
        way = [_Place(-1, 1.0, draft.draws_at(-1))]
        while True:
            place = way[-1]
            if place.tried < len(place.draws):
                if place.target is None:
                    place.target = rows.row(place.node + 1)
                child = self._next(draft, place, probs)
                if child.level > 0.0:
                    way.append(child)
                else:  # its descendants are not looked at
                    self._refuse(draft, place)
            elif len(way) == 1 or noise.uniform() < place.level:
                row = place.node + 1
                target = rows.row(row) if place.target is None else place.target
                token = draw(target, noise.uniform(), rows.support(row))
                return ended(draft, [p.node for p in way[1:]], token, _refused(way))
            else:
                way.pop()
                self._refuse(draft, way[-1])

    @staticmethod
    def _next(draft: Draft, place: _Place, probs: Row | None) -> _Place:
        """The place of this one's next draw, to be judged."""
        drawn = place.draws[place.tried]
        place.tried += 1
        source = source_of(drawn, probs)
        place.source = place.untried if source is not None and place.untried is not None else source
        assert place.target is not None
        level = level_of(place.level, place.target, place.source, draft.tree.tokens[drawn.node])
        return _Place(drawn.node, level, draft.draws_at(drawn.node))

    @staticmethod
    def _refuse(draft: Draft, place: _Place) -> None:
        """Remove the draw that was rejected last from the place's distribution and level."""
        token = draft.tree.tokens[place.draws[place.tried - 1].node]
        source = place.source
        assert place.target is not None
        place.target, place.level = after_refusal(place.level, place.target, source, token)
        if draft.kind == "without_replacement" and source is not None and source[token] > 0.0:
            place.untried = without(source, token)


def _refused(way: list[_Place]) -> list[int]:
    """Rejected nodes beside the path and after its end, from the root on; without descendants of rejected nodes."""
    path = {place.node for place in way}
    tried = [drawn.node for place in way for drawn in place.draws[: place.tried]]
    return [node for node in dict.fromkeys(tried) if node not in path]


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
