"""Drafters with a cache of their own, which has a slot for each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sakiyomi.drafters.base import Context, Drafter
from sakiyomi.drafters.draft_tree_state import RequestMemory
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.sampler import Sampler


@dataclass(eq=False, slots=True)
class Seat(RequestMemory):
    """A request's slot in the drafter's cache.

    Attributes:
        slot: the slot.
    """

    slot: int = -1


S = TypeVar("S", bound=Seat)


class SeatDrafter(Drafter, Generic[S]):
    """Keeps a slot for each request, from the first hidden states on.

    Attributes:
        seat_type: what is kept of a request.
    """

    seat_type: Callable[..., S]
    model: ModelRunner
    _vocab_size: int

    def seat(self, context: Context) -> S:
        """The request's seat; a new one with an empty slot where it has none."""
        found: S | None = context.memory.get(self.name)
        if found is None:
            sampler = Sampler(context.params, self._vocab_size)
            found = context.memory[self.name] = self.seat_type(sampler, slot=self.model.cache.take())
        return found

    def inherit(self, context: Context, earlier: Context) -> None:
        """See ``Drafter.inherit``: the request takes over the slot, where the tokens in common stay."""
        seat: S | None = earlier.memory.pop(self.name, None)
        if seat is not None:
            seat.sampler, seat.tree = Sampler(context.params, self._vocab_size), None
            context.memory[self.name] = seat

    def end(self, context: Context) -> None:
        """Free the request's slot."""
        seat: S | None = context.memory.pop(self.name, None)
        if seat is not None:
            self.model.cache.release(seat.slot)
