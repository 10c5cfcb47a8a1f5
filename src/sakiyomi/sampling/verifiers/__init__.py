"""Acceptance rules, by name. A new rule is a file here and one line in ``VERIFIERS``."""

from __future__ import annotations

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import DraftKind
from sakiyomi.sampling.verifiers.base import Rows, Verifier
from sakiyomi.sampling.verifiers.block import BlockVerifier
from sakiyomi.sampling.verifiers.coupled import CoupledVerifier
from sakiyomi.sampling.verifiers.greedy import GreedyVerifier
from sakiyomi.sampling.verifiers.ratio import RatioVerifier, residual
from sakiyomi.sampling.verifiers.traversal import TraversalVerifier
from sakiyomi.sampling.verifiers.typical import TypicalVerifier

__all__ = [
    "VERIFIERS",
    "BlockVerifier",
    "CoupledVerifier",
    "GreedyVerifier",
    "RatioVerifier",
    "Rows",
    "TraversalVerifier",
    "TypicalVerifier",
    "Verifier",
    "check_fits",
    "choose_verifier",
    "residual",
]

VERIFIERS: dict[str, Verifier] = {
    "greedy": GreedyVerifier(),
    "ratio": RatioVerifier(),
    "coupled": CoupledVerifier(),
    "block": BlockVerifier(),
    "traversal": TraversalVerifier(),
    "typical": TypicalVerifier(),
}

AUTOMATIC: dict[DraftKind | None, str] = {"chain": "block", "point_mass": "ratio", None: "ratio"}
"""What "auto" is without a seed; the coupled rule for other kinds."""


def choose_verifier(params: SamplingParams, kind: DraftKind | None, branches: bool = False) -> Verifier:
    """The rule for a request.

    Greedy at temperature 0, whatever ``acceptance`` says: there all rules agree. Else what was asked for; "auto" is the
    coupled rule where a seed is given (its text depends on the seed alone) and for trees and merged drafts, where it
    accepts most; block verification for a single drawn chain, of which it accepts most; the ratio rule for point
    masses, of which all accept alike and that one is the cheapest.

    Args:
        params: of the request.
        kind: what the drafter proposes; None: nothing is drafted, and every rule fits.
        branches: it makes trees that follow the position's noise where the rule is coupled.

    Raises:
        InputError: the rule that was asked for does not take such drafts.
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
    """Refuse a draft that the rule would not keep lossless, before any work is done.

    Raises:
        InputError: with the rules that take it.
    """
    if kind in verifier.takes:
        return
    able = ", ".join(f'"{name}"' for name, other in VERIFIERS.items() if kind in other.takes and other.lossless)
    raise InputError(
        f'acceptance "{verifier.name}" does not take a draft of kind "{kind}"; '
        + (f"available for it are {able}" if able else "no rule does")
    )
