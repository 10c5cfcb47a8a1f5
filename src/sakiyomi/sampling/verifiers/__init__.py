"""Acceptance rules, by name.

A new rule is a file here, an instance in ``RULES``, and a name in ``Acceptance`` and ``ACCEPTANCES`` (core/params.py).
Rules that `kernels/verify.h` has too run compiled: in ``native.verify_all``, and in rounds in the kernels (round.h).
The Python rules are their oracle and fallback.
"""

from __future__ import annotations

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import DraftKind
from sakiyomi.sampling.verifiers.base import Rows, Verifier
from sakiyomi.sampling.verifiers.block import BlockVerifier
from sakiyomi.sampling.verifiers.coupled import CoupledVerifier
from sakiyomi.sampling.verifiers.greedy import GreedyVerifier
from sakiyomi.sampling.verifiers.ratio import RatioVerifier
from sakiyomi.sampling.verifiers.traversal import TraversalVerifier
from sakiyomi.sampling.verifiers.typical import TypicalVerifier

__all__ = ["VERIFIERS", "Rows", "Verifier", "check_fits", "choose_verifier"]

RULES = GreedyVerifier(), RatioVerifier(), CoupledVerifier(), BlockVerifier(), TraversalVerifier(), TypicalVerifier()
VERIFIERS: dict[str, Verifier] = {rule.name: rule for rule in RULES}

AUTOMATIC: dict[DraftKind | None, str] = {"chain": "block", "point_mass": "ratio", None: "ratio"}
"""What "auto" means without a seed, by the kind of draft; for other kinds it is the coupled rule."""


def choose_verifier(params: SamplingParams, kind: DraftKind | None, branches: bool = False) -> Verifier:
    """The rule for a request.

    At temperature 0 it is the greedy rule, since all rules agree there. Otherwise ``acceptance`` names it. "auto" is:

    - the coupled rule if a seed is given (the text then depends on the seed alone), for merged drafts, and for trees of
      drafters that follow the position's noise (``branches``): it accepts most of these;
    - block verification for a single drawn chain, of which it accepts most;
    - the ratio rule for point masses, which all rules accept equally often and which it verifies at the least cost.

    Args:
        params: of the request.
        kind: of the drafts; None: nothing is drafted, and every rule fits.
        branches: the drafts are trees that follow the position's noise where the rule is "coupled".

    Raises:
        InputError: the named rule does not accept drafts of this kind.
    """
    if params.greedy:
        return VERIFIERS["greedy"]
    name: str = params.acceptance
    if name == "auto":
        free = params.seed is None and not branches
        name = AUTOMATIC.get(kind, "coupled") if free else "coupled"
    verifier = VERIFIERS[name]
    if kind is not None:
        check_fits(kind, verifier)
    return verifier


def check_fits(kind: DraftKind, verifier: Verifier) -> None:
    """Refuse drafts that this rule does not verify losslessly, before any work is done.

    Raises:
        InputError: naming the rules that accept such drafts.
    """
    if kind in verifier.takes:
        return
    able = ", ".join(f'"{name}"' for name, other in VERIFIERS.items() if kind in other.takes and other.lossless)
    raise InputError(
        f'acceptance "{verifier.name}" does not take a draft of kind "{kind}"; '
        + (f"available for it are {able}" if able else "no rule does")
    )
