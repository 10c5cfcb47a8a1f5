"""What drafters have in common that read nothing but the text: a reader a request, kept level with its tokens."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context, Drafter
from sakiyomi.drafters.growth import GuessedTree

__all__ = ["FLOOR", "Reader", "TextDrafter"]

FLOOR = 0.04
"""Least chance of being reached with which a token is proposed: about what one more row of a pass costs, in tokens."""
CHUNK = 4096  # tokens that are taken in before others have their turn: some 20 ms


class Reader(Protocol):
    """What is known of one request's text."""

    def read(self, tokens: Sequence[int]) -> None:
        """Take in what the text goes on with."""
        ...

    def branch(self, head: Sequence[int]) -> None:
        """Go on behind ``head``, the beginning of what was read; what came behind it is another text from now on."""
        ...

    def guess(self, context: Context, depth: int) -> GuessedTree:
        """What may come next: at most ``context.nodes`` nodes, at most ``depth`` deep; all of the text was read."""
        ...


@dataclass(eq=False, slots=True)
class _Following:
    """A reader, and how many of the request's tokens it has read."""

    reader: Reader
    read: int = 0


class TextDrafter(Drafter):
    """Proposes point masses from the text alone. Subclasses give ``name`` and ``reader``.

    Attributes:
        forward_seconds: spent on drafts and on reading, prompts included.
        prefill_seconds: spent on reading prompts.
    """

    kind: DraftKind = "point_mass"
    forward_seconds = 0.0
    prefill_seconds = 0.0

    @abstractmethod
    def reader(self, context: Context) -> Reader:
        """For a new request; nothing was read yet."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        began = time.perf_counter()
        drafts = [self._propose(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]
        self.forward_seconds += time.perf_counter() - began
        return drafts

    def inherit(self, context: Context, earlier: Context) -> None:
        """Go on with what was read of an earlier request of the same conversation."""
        following: _Following | None = earlier.memory.pop(self.name, None)
        if following is None:
            return
        shared = 0
        for old, new in zip(earlier.tokens[: following.read], context.tokens, strict=False):
            if old != new:
                break
            shared += 1
        if shared < following.read:
            following.reader.branch(context.tokens[:shared])
            following.read = shared
        context.memory[self.name] = following

    def _propose(self, context: Context, gamma: int) -> Draft:
        following: _Following | None = context.memory.get(self.name)
        if following is None:
            following = context.memory[self.name] = _Following(self.reader(context))
            if context.source is not None:
                began = time.perf_counter()
                following.reader.read(context.source.tokens)
                self.prefill_seconds += time.perf_counter() - began
        tokens = context.tokens
        missing = len(tokens) - following.read
        if missing > 64:
            began = time.perf_counter()
            end = min(len(tokens), following.read + CHUNK)
            following.reader.read(tokens[following.read : end])
            following.read = end
            self.prefill_seconds += time.perf_counter() - began
            if end < len(tokens):
                return Draft.empty()
        elif missing:
            following.reader.read(tokens[following.read :])
            following.read = len(tokens)
        if context.worth is None:
            return following.reader.guess(context, gamma).draft(self.name)
        guessed = following.reader.guess(context, context.worth.depth)
        return guessed.best(context.nodes, context.worth).draft(self.name)
