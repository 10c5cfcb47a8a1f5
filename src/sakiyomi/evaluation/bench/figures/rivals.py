"""A rule that others use, as something to be compared with; it is no acceptance rule that a user could ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context

__all__ = ["GreedyDraft"]


class GreedyDraft:
    """Sample and compare: the draft says what it thinks most likely, the target samples, and equal tokens stay.

    The rule of the first assisted generation of transformers. It is lossless, and accepts a token with the target's
    probability of the draft's best guess (``theory.guess_acceptance``), which falls with the temperature; the draft's
    own temperature plays no part. With ``acceptance="coupled"`` the target's own draw is compared with the draft, which
    is just this.

    Args:
        drafter: a draft model (``ModelDrafter``), not used by another engine at the same time.
    """

    name = "greedy-draft"
    kind: DraftKind = "point_mass"

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter

    @property
    def model(self) -> Any:
        """The draft."""
        return self._drafter.model

    @property
    def passes(self) -> int:
        """Passes over levels so far."""
        return int(self._drafter.passes)

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the draft's forwards so far."""
        return float(self._drafter.forward_seconds)

    @property
    def prefill_seconds(self) -> float:
        """Of those, seconds over prompts."""
        return float(self._drafter.prefill_seconds)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        drafts: list[Draft] = self._drafter.propose([_cold(context) for context in contexts], gammas)
        return drafts

    def end(self, context: Context) -> None:
        """Free the request's slot."""
        self._drafter.end(context)


def _cold(context: Context) -> Context:
    """The same request at temperature 0; tokens and memory are its own."""
    params = SamplingParams(max_new_tokens=context.params.max_new_tokens, gamma=context.params.gamma, tree="chain")
    return replace(context, params=params, rule="greedy")
