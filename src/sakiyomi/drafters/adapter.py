"""Drafters that are no subclass of ``Drafter``: objects with ``name``, ``kind`` and ``propose``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context, Drafter

__all__ = ["DrafterAdapter", "Proposer", "as_drafter"]


class Proposer(Protocol):
    """The least that an object must have to be used as a drafter; see ``Drafter`` for the members."""

    @property
    def name(self) -> str:
        """See ``Drafter``."""
        ...

    @property
    def kind(self) -> DraftKind:
        """See ``Drafter``."""
        ...

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        ...


class DrafterAdapter(Drafter):
    """Gives a ``Proposer`` the other members of a ``Drafter``: its own where it has them, else the defaults.

    Its clocks are looked up at each use, since they may be plain attributes that grow.

    Args:
        proposer: what is adapted.
    """

    def __init__(self, proposer: Any) -> None:
        from sakiyomi.model_executor.runner import ModelRunner

        self.proposer = proposer
        self.runs_model = hasattr(proposer, "passes")
        self.prefers_coupled = hasattr(proposer, "kind_for")
        self.hidden_states = getattr(proposer, "hidden_states", None)
        model = getattr(proposer, "model", None)
        if isinstance(model, ModelRunner):  # any other model is the proposer's own matter
            self.model = model
        for name in ("kind_for", "observe", "inherit", "end"):
            if hasattr(proposer, name):
                setattr(self, name, getattr(proposer, name))

    @property
    def name(self) -> str:
        """See ``Drafter``; setting it renames the proposer."""
        return str(self.proposer.name)

    @name.setter
    def name(self, name: str) -> None:
        self.proposer.name = name

    @property
    def kind(self) -> DraftKind:  # type: ignore[override]
        """See ``Drafter``."""
        kind: DraftKind = self.proposer.kind
        return kind

    @property
    def passes(self) -> int:
        """See ``Drafter.passes``."""
        return int(getattr(self.proposer, "passes", 0))

    @property
    def forward_seconds(self) -> float:
        """See ``Drafter.forward_seconds``."""
        return float(getattr(self.proposer, "forward_seconds", 0.0))

    @property
    def prefill_seconds(self) -> float:
        """See ``Drafter.prefill_seconds``."""
        return float(getattr(self.proposer, "prefill_seconds", 0.0))

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        drafts: list[Draft] = self.proposer.propose(contexts, gammas)
        return drafts


def as_drafter(given: Drafter | Proposer) -> Drafter:
    """The object itself if it is a ``Drafter``, else one that adapts it.

    Raises:
        InputError: it has no ``propose``, ``name`` or ``kind``.
    """
    if isinstance(given, Drafter):
        return given
    missing = [name for name in ("propose", "name", "kind") if not hasattr(given, name)]
    if missing:
        raise InputError(f"the drafter {type(given).__name__} has no {missing[0]}; it needs name, kind and propose")
    return DrafterAdapter(given)
