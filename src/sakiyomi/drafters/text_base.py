"""Base of drafters that read only the text: one reader for each request, kept up to date."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sakiyomi.cache.prefix import alike
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context, Drafter
from sakiyomi.drafters.guessed_tree import GuessedTree

__all__ = ["FLOOR", "Reader", "TextDrafter"]

FLOOR = 0.04
"""Least chance of a proposed token: about the cost of one more row of a pass, in tokens."""
CHUNK = 4096  # most tokens that are read in one round, about 20 ms, so that other requests do not wait long
LONG = 64  # more tokens than these at once are a prompt


class Reader(Protocol):
    """Learns from one request's text, and guesses its continuation."""

    def read(self, tokens: Sequence[int]) -> None:
        """Learn the next tokens of the text."""
        ...

    def branch(self, head: Sequence[int]) -> None:
        """Continue behind ``head``, the beginning of what was read; what followed it becomes another text."""
        ...

    def guess(self, context: Context, depth: int) -> GuessedTree:
        """What may come next after all that was read: at most ``context.nodes`` nodes, at most ``depth`` deep."""
        ...


@dataclass(eq=False, slots=True)
class _ReadText:
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
        """A reader for a new request, of which nothing was read yet."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        began = time.perf_counter()
        drafts = [self._propose(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]
        self.forward_seconds += time.perf_counter() - began
        return drafts

    def inherit(self, context: Context, earlier: Context) -> None:
        """See ``Drafter.inherit``: the reader continues behind the tokens that both requests begin with."""
        text: _ReadText | None = earlier.memory.pop(self.name, None)
        if text is None:
            return
        shared = alike(earlier.tokens[: text.read], context.tokens)
        if shared < text.read:
            text.reader.branch(context.tokens[:shared])
            text.read = shared
        context.memory[self.name] = text

    def _propose(self, context: Context, gamma: int) -> Draft:
        text: _ReadText | None = context.memory.get(self.name)
        if text is None:
            text = context.memory[self.name] = _ReadText(self.reader(context))
            if context.source is not None:
                self._prefill(text.reader, context.source.tokens)
        missing = context.tokens[text.read : text.read + CHUNK]
        if len(missing) > LONG:
            self._prefill(text.reader, missing)
        elif missing:
            text.reader.read(missing)
        text.read += len(missing)
        if text.read < len(context.tokens):
            return Draft.empty()
        if context.worth is None:
            return text.reader.guess(context, gamma).draft(self.name)
        guessed = text.reader.guess(context, context.worth.depth)
        return guessed.best(context.nodes, context.worth).draft(self.name)

    def _prefill(self, reader: Reader, tokens: Sequence[int]) -> None:
        """Read tokens, and count the time as spent on prompts."""
        began = time.perf_counter()
        reader.read(tokens)
        self.prefill_seconds += time.perf_counter() - began
