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

from sakiyomi.core.tree import DraftKind
from sakiyomi.sampling.verifiers.traversal import TraversalVerifier


class BlockVerifier(TraversalVerifier):
    """Traversal verification of a chain, which is block verification.

    Never accepts fewer tokens on average than the ratio rule, but also reads the rows after a rejected token. A chain
    may include point masses. Uniforms are used from the end of the chain to its beginning, one for each node that is
    verified, and none at the beginning itself.
    """

    name = "block"
    takes: frozenset[DraftKind] = frozenset({"chain"})
