"""What finished requests left in the cache, so that the next prompt goes on from the one that it shares most with."""

from __future__ import annotations

from collections.abc import Sequence

from sakiyomi.request import Place

__all__ = ["Shelf"]

LEAST = 8  # tokens in common that are worth a place


class Shelf:
    """Places of requests that are over. The engine takes their slots, the longest unused first, where it needs them."""

    def __init__(self) -> None:
        self._idle: list[Place] = []

    def choose(self, tokens: Sequence[int]) -> Place:
        """The place that holds most of this prompt's beginning; a new one where none does, or it would lose more."""
        self._idle = [place for place in self._idle if place.slot is not None]
        best = max(self._idle, key=lambda place: place.shared(tokens), default=None)
        if best is None or (shared := best.shared(tokens)) < LEAST or 2 * shared < min(len(best.held), len(tokens)):
            return Place()
        self._idle.remove(best)
        return best

    def put_back(self, place: Place) -> None:
        """Its request is over."""
        if place.slot is not None:
            self._idle.append(place)
