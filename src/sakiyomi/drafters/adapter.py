"""Drafters that are no subclass of ``Drafter``: objects with ``name``, ``kind`` and ``propose``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context, Drafter

_NEEDED = ("propose", "name", "kind")
_OPTIONAL = (
    "kind_for", "observe", "rank", "inherit", "end", "forget", "hidden_states", "leading", "model", "runs_model",
    "prefers_coupled", "passes", "forward_seconds", "prefill_seconds",
)  # fmt: skip
_TYPES: dict[str, Callable[[Any], Any]] = {"passes": int, "forward_seconds": float, "prefill_seconds": float}


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


def as_drafter(given: Drafter | Proposer) -> Drafter:
    """The object itself if it is a ``Drafter``, else a drafter with its members, and the defaults for the others.

    Members are read at each use: clocks may be plain attributes that grow.

    Raises:
        InputError: it has no ``propose``, ``name`` or ``kind``.
    """
    from sakiyomi.model_executor.runner import ModelRunner

    if isinstance(given, Drafter):
        return given
    missing = [name for name in _NEEDED if not hasattr(given, name)]
    if missing:
        raise InputError(f"the drafter {type(given).__name__} has no {missing[0]}; it needs name, kind and propose")
    own = {name: _member(given, name) for name in (*_NEEDED, *_OPTIONAL) if hasattr(given, name)}
    if not isinstance(getattr(given, "model", None), ModelRunner):  # a model of another kind is private to the object
        own.pop("model", None)
    guessed = {"runs_model": "passes" in own, "prefers_coupled": "kind_for" in own}
    adapted: Drafter = type("AdaptedDrafter", (Drafter,), guessed | own)()
    return adapted


def _member(given: Any, name: str) -> Any:
    """A property that is the object's attribute, in the type that it should have."""
    kind = _TYPES.get(name, lambda value: value)
    return property(lambda _: kind(getattr(given, name)), lambda _, value: setattr(given, name, value))
