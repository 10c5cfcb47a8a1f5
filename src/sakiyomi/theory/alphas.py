"""How often a draft token is accepted, from two distributions or from counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sakiyomi.core.errors import InputError
from sakiyomi.theory.chains import expected_tokens
from sakiyomi.theory.checks import count, distribution, fraction


def acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Probability that a token drawn from q is accepted by a target p: sum of min(p, q), which is 1 - TV(p, q).

    Section 3.2, theorem 3.5 and corollary 3.6: its mean over prefixes is alpha.

    Args:
        p: (V) the target's distribution, sum 1.
        q: (V) the draft's, over the same vocabulary.

    Returns:
        Between 0 and 1.

    Raises:
        InputError: lengths differ, or one is not a distribution.
    """
    return min(1.0, math.fsum(map(min, *_pair(p, q))))


def total_variation(p: Sequence[float], q: Sequence[float]) -> float:
    """Distance of two distributions, half the sum of |p - q|; 1 - ``acceptance``. Section 3.2, lemma 3.3.

    Args:
        p, q: (V) distributions over one vocabulary.

    Returns:
        Between 0 and 1.

    Raises:
        InputError: as ``acceptance``.
    """
    return 1.0 - acceptance(p, q)


def mean_acceptance(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Alpha: the mean of ``acceptance`` (the paper's beta) over prefixes. Definition 3.1, corollary 3.6.

    Args:
        pairs: p and q at each prefix, at least one.

    Raises:
        InputError: there is none, or one of them is not a pair of distributions.
    """
    if not pairs:
        raise InputError("pairs is empty; give p and q of at least one prefix")
    return math.fsum(acceptance(p, q) for p, q in pairs) / len(pairs)


def guess_acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Acceptance of a draft that proposes its most probable token instead of drawing one: p of that token.

    ``acceptance`` with a point mass in place of q: all that greedy and n-gram drafts have. Far below the sum of
    min(p, q) where both are flat. Section 2.3 with q one-hot.

    Args:
        p, q: (V) distributions over one vocabulary.

    Raises:
        InputError: as ``acceptance``.
    """
    target, draft = _pair(p, q)
    return target[max(range(len(draft)), key=draft.__getitem__)]


def matching_acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Acceptance if target and draft both draw and equal tokens are accepted: sum of p x q, at most ``acceptance``.

    This is "sample and compare", which rejection sampling (section 2.3) replaces.

    Args:
        p, q: (V) distributions over one vocabulary.

    Raises:
        InputError: as ``acceptance``.
    """
    target, draft = _pair(p, q)
    return math.fsum(a * b for a, b in zip(target, draft, strict=True))


def alpha_of(tokens: float, gamma: int) -> float:
    """Inverse of ``expected_tokens``: the alpha at which a chain of gamma commits this many tokens per target pass.

    Args:
        tokens: per target pass, between 1 and gamma + 1.
        gamma: 1 or more.

    Raises:
        InputError: no alpha has so many.
    """
    count("gamma", gamma, 1)
    if not 1.0 <= tokens <= gamma + 1:
        raise InputError(f"tokens is {tokens!r}; with gamma {gamma} a pass commits between 1 and {gamma + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return (low + high) / 2


def positional_acceptance(drafted: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """Acceptance of each place of a draft, counted over the rounds that came to it.

    Accepted / (accepted + refused): tokens behind a refused one were never looked at, so that accepted / drafted would
    be too low (it is the mean of alpha^i over the places). A place that no round came to is left out, with all behind.

    Args:
        drafted: draft tokens of each round.
        accepted: of these.

    Raises:
        InputError: lengths differ, or more was accepted than drafted.
    """
    if len(drafted) != len(accepted):
        raise InputError(f"drafted has {len(drafted)} rounds, accepted {len(accepted)}; expected as many")
    for number, (asked, kept) in enumerate(zip(drafted, accepted, strict=True)):
        if not 0 <= kept <= asked:
            raise InputError(f"round {number} accepted {kept} of {asked} tokens")
    found = []
    for place in range(max(drafted, default=0)):
        came = sum(asked > place and kept >= place for asked, kept in zip(drafted, accepted, strict=True))
        if not came:
            break
        found.append(sum(kept > place for kept in accepted) / came)
    return found


def synchronous_alpha(alpha: float, batch: int) -> float:
    """Alpha if all requests of a batch are cut to the one that accepted the fewest tokens: alpha^batch.

    This is the rule of engines that keep one length for all requests. Here each request keeps its own length, so alpha
    does not change and only the pass grows: see ``round_speedup``.

    Args:
        alpha: in [0, 1].
        batch: requests, 1 or more.
    """
    return fraction("alpha", alpha) ** count("batch", batch, 1)


def _pair(p: Sequence[float], q: Sequence[float]) -> tuple[list[float], list[float]]:
    target, draft = distribution("p", p), distribution("q", q)
    if len(target) != len(draft):
        raise InputError(f"p has {len(target)} entries, q {len(draft)}; expected one vocabulary")
    return target, draft
