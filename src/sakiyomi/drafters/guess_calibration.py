"""Calibrates guesses from a text by how often guesses of the same kind were right in it."""

from __future__ import annotations

from collections.abc import Sequence


class GuessCalibration:
    """Counts right guesses by kind, from the committed text; guesses too unsure to be proposed count too.

    Each request has its own counts, so its drafts depend on its own text alone.

    Args:
        priors: initial chance of each kind.
        weight: of the prior, in guesses.
        memory: factor by which older guesses of a kind fade with each new one.
    """

    __slots__ = ("_hits", "_memory", "_path", "_position", "_tries", "chances")

    def __init__(self, priors: Sequence[float], weight: float = 4.0, memory: float = 0.98) -> None:
        self.chances = list(priors)
        self._hits = [prior * weight for prior in priors]
        self._tries = [weight] * len(priors)
        self._memory = memory
        self._position = 0
        self._path: Sequence[tuple[int, int]] = ()

    def expect(self, position: int, path: Sequence[tuple[int, int]]) -> None:
        """Remember a guess.

        Args:
            position: of its first token in the text.
            path: kind and token, one after the other.
        """
        self._position, self._path = position, path

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the last guess with the committed text, up to the first wrong token."""
        position, known = self._position, len(tokens)
        for kind, token in self._path:
            if position >= known:
                break
            right = tokens[position] == token
            hits = self._hits[kind] = self._hits[kind] * self._memory + right
            tries = self._tries[kind] = self._tries[kind] * self._memory + 1.0
            self.chances[kind] = hits / tries
            if not right:
                break
            position += 1
        self._path = ()
