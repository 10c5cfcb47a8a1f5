"""Typical acceptance: tokens that are not unlikely are accepted. Lossy: the text has another distribution.

Cai et al. 2024, arXiv 2401.10774, section 2.3.1: a drafted token x is accepted where p(x) is above
min(epsilon, delta exp(-H(p))).
"""

from __future__ import annotations

import math

import numpy as np

from sakiyomi.core.tree import Draft, Verdict
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import Row, draw
from sakiyomi.sampling.verifiers.base import Rows, Rule, Verifier, ended


def threshold(probs: Row, epsilon: float, delta: float) -> float:
    """Probability above which a token is typical; less than the largest one, so that some token always is.

    Args:
        probs: (V,) of the target, after temperature and truncation.
        epsilon, delta: as in ``SamplingParams``.
    """
    some = probs[probs > 0.0].astype(np.float64)
    entropy = -float((some * np.log(some)).sum())
    return min(epsilon, delta * math.exp(-entropy), float(some.max()) * (1.0 - 1e-6))


class TypicalVerifier(Verifier):
    """Accepts the longest path of typical tokens, the likeliest of several; the next token is drawn among typical ones.

    Drafters propose the most probable tokens, which are the ones that this rule accepts. Its thresholds are the
    request's ``epsilon`` and ``delta``.
    """

    name = "typical"
    rule: Rule = "greedy"
    lossless = False

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        """See ``Verifier.verify``."""
        params = rows.params
        epsilon, delta = params.epsilon, params.delta
        tree = draft.tree
        scores = {-1: 0.0}  # log probability of the paths of typical tokens, by their last node
        level = [-1]
        while True:
            below: list[int] = []
            for place in level:
                children = tree.children(place)
                if not children:
                    continue
                probs = rows.row(place + 1)
                least = threshold(probs, epsilon, delta)
                for node in children:
                    chance = float(probs[tree.tokens[node]])
                    if chance > least:
                        scores[node] = scores[place] + math.log(chance)
                        below.append(node)
            if not below:
                break
            level = below
        end = max(level, key=scores.__getitem__)
        path = tree.path(end)
        refused: list[int] = []
        for place, taken in zip((-1, *path), (*path, -1), strict=True):
            siblings = tree.children(place)
            before = siblings[: siblings.index(taken)] if taken >= 0 else siblings
            refused += [node for node in before if node not in scores]
        probs = rows.row(end + 1)
        kept = np.where(probs > threshold(probs, epsilon, delta), probs, np.float32(0.0))
        token = draw(kept, noise.fork("typical").uniform())
        return ended(draft, path, token, refused)
