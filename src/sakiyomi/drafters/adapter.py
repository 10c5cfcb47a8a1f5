"""Drafters that are no subclass of ``Drafter``: objects with ``name``, ``kind`` and ``propose``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context, Drafter


class Proposer(Protocol):
    """The members that an object needs to be used as a drafter; ``Drafter`` describes them."""

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


def _own(name: str, default: Any = None) -> Any:
    """A property that reads the proposer's attribute at each use: clocks may be plain attributes that grow.

    Args:
        name: of the attribute.
        default: what it is where the proposer has none; a number's type is that of the property.
    """
    kind = type(default)
    if default is None:
        return property(lambda self: getattr(self.proposer, name, None))
    return property(lambda self: kind(getattr(self.proposer, name, default)))


class DrafterAdapter(Drafter):
    """A ``Proposer`` with all members of a ``Drafter``: the proposer's where it has them, else the defaults.

    Args:
        proposer: what is adapted.
    """

    def __init__(self, proposer: Any) -> None:
        from sakiyomi.model_executor.runner import ModelRunner

        self.proposer = proposer
        self.runs_model = hasattr(proposer, "passes")
        self.prefers_coupled = hasattr(proposer, "kind_for")
        model = getattr(proposer, "model", None)
        if isinstance(model, ModelRunner):  # a model of another kind is private to the proposer
            self.model = model
        for name in ("kind_for", "observe", "inherit", "end"):
            if hasattr(proposer, name):
                setattr(self, name, getattr(proposer, name))

    kind = _own("kind")
    hidden_states = _own("hidden_states")
    passes = _own("passes", 0)
    forward_seconds = _own("forward_seconds", 0.0)
    prefill_seconds = _own("prefill_seconds", 0.0)

    @property
    def name(self) -> str:
        """See ``Drafter``; setting it renames the proposer."""
        return str(self.proposer.name)

    @name.setter
    def name(self, name: str) -> None:
        self.proposer.name = name

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
