"""Acceptance rules, by name. A new rule is a file here and one line in ``VERIFIERS``."""

from __future__ import annotations

from sakiyomi.errors import InputError
from sakiyomi.params import SamplingParams
from sakiyomi.tree import DraftKind
from sakiyomi.verifiers.base import Rows, Verifier
from sakiyomi.verifiers.coupled import CoupledVerifier
from sakiyomi.verifiers.greedy import GreedyVerifier
from sakiyomi.verifiers.ratio import RatioVerifier, residual

__all__ = [
    "VERIFIERS",
    "CoupledVerifier",
    "GreedyVerifier",
    "RatioVerifier",
    "Rows",
    "Verifier",
    "check_fits",
    "choose_verifier",
    "residual",
]

VERIFIERS: dict[str, Verifier] = {
    "greedy": GreedyVerifier(),
    "ratio": RatioVerifier(),
    "coupled": CoupledVerifier(),
}


def choose_verifier(params: SamplingParams, kind: DraftKind, branches: bool = False) -> Verifier:
    """The rule for a request.

    Greedy at temperature 0, whatever ``acceptance`` says: there all rules agree. Else what was asked for; "auto" is the
    coupled rule where a seed is given (its text depends on the seed alone) and for trees and merged drafts, where it
    accepts most; the ratio rule for a single drawn chain, where that accepts most, and for point masses, where the two
    accept alike and the ratio rule is the cheaper.

    Args:
        params: of the request.
        kind: what the drafter proposes.
        branches: it makes trees that follow the position's noise where the rule is coupled.

    Raises:
        InputError: the rule that was asked for does not take such drafts.
    """
    if params.greedy:
        return VERIFIERS["greedy"]
    name = params.acceptance
    if name == "auto":
        alone = kind in ("chain", "point_mass") and not branches
        name = "ratio" if alone and params.seed is None else "coupled"
    verifier = VERIFIERS[name]
    check_fits(kind, verifier)
    return verifier


def check_fits(kind: DraftKind, verifier: Verifier) -> None:
    """Refuse a draft that the rule would not keep lossless, before any work is done.

    Raises:
        InputError: with the rules that take it.
    """
    if kind in verifier.takes:
        return
    able = ", ".join(f'"{name}"' for name, other in VERIFIERS.items() if kind in other.takes)
    raise InputError(
        f'acceptance "{verifier.name}" does not take a draft of kind "{kind}"; '
        + (f"available for it are {able}" if able else "no rule does")
    )
