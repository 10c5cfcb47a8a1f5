"""Base of drafters that read only the text: one reader for each request, kept up to date."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from sakiyomi.cache.prefix import alike
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context, Drafter
from sakiyomi.drafters.confidence import GuessCalibration
from sakiyomi.drafters.guessed_tree import GuessedTree, grow
from sakiyomi.drafters.native_texts import CHUNK, LONG, NativeTexts
from sakiyomi.kernels.build import loaded

FLOOR = 0.04
"""Least chance of a proposed token: about the cost of one more row of a pass, in tokens."""


class Reader(ABC):
    """Learns from one request's text, and guesses its continuation from places in it, see ``guessed_tree.grow``.

    Args:
        priors: initial chance of each kind of guess.

    Attributes:
        seen: how many of the request's tokens were read.
        calibration: how often guesses were right, by kind.
    """

    seen = 0

    def __init__(self, priors: Sequence[float]) -> None:
        self.calibration = GuessCalibration(priors)
        self._path: list[tuple[int, int]] = []  # kinds and tokens of the likeliest path
        self._end: Any = None  # the place behind it

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> None:
        """Learn the next tokens of the text."""

    @abstractmethod
    def branch(self, head: Sequence[int]) -> None:
        """Continue behind ``head``, the beginning of what was read; what followed it becomes another text."""

    @abstractmethod
    def guess(self, context: Context, depth: int) -> GuessedTree:
        """Guess what follows all that was read: at most ``context.nodes`` nodes, at most ``depth`` deep."""

    @abstractmethod
    def expand(self, place: Any) -> Sequence[tuple[int, float, Any]]:
        """The continuations of a place, see ``guessed_tree.Expand``; calls ``_note`` with the best one."""

    def _note(self, place: Any, kind: int, token: int, behind: Any) -> None:
        """Remember the best continuation of a place if it extends the likeliest path."""
        if place is self._end:
            self._path.append((kind, token))
            self._end = behind

    def _grow(self, start: Any, context: Context, depth: int) -> GuessedTree:
        """The guesses behind a place."""
        self._path, self._end = [], start
        found = grow(start, self.expand, depth, context.nodes, FLOOR, context.stop_ids)
        self.calibration.expect(len(context.tokens), self._path)
        return found


class TextDrafter(Drafter):
    """Proposes point masses from the text alone. Subclasses give ``name`` and ``reader``.

    Attributes:
        compiled: in a class's own body: the kernels have a reader for it, which ``add_reader`` adds. Its subclasses do
            not inherit that, as they may read differently.
        forward_seconds: spent on drafts and on reading, prompts included.
        prefill_seconds: spent on reading prompts.
    """

    compiled: ClassVar[bool] = False
    kind: DraftKind = "point_mass"
    forward_seconds = 0.0
    prefill_seconds = 0.0

    @abstractmethod
    def reader(self, context: Context) -> Reader:
        """A reader for a new request; it has read nothing yet."""

    def add_reader(self, text: int, context: Context) -> None:
        """Add a reader of the kernels to a text there, if there is one (see ``compiled``)."""
        raise NotImplementedError

    @cached_property
    def kernels(self) -> Any:
        """The kernels that have a reader for it, decided when they are first wanted; None: there are none."""
        return loaded() if vars(type(self)).get("compiled") else None

    @cached_property
    def texts(self) -> NativeTexts | None:
        """Of its requests, in the kernels; None: they are here."""
        return NativeTexts(self, [weakref.proxy(self)]) if self.kernels is not None else None

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        if self.texts is not None:
            return self.texts.propose(contexts, gammas)
        began = time.perf_counter()
        drafts = [self._propose(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]
        self.forward_seconds += time.perf_counter() - began
        return drafts

    def inherit(self, context: Context, earlier: Context) -> None:
        """See ``Drafter.inherit``: the reader continues behind the tokens that both requests begin with."""
        if self.texts is not None:
            self.texts.inherit(context, earlier)
            return
        reader: Reader | None = earlier.memory.pop(self.name, None)
        if reader is None:
            return
        shared = alike(earlier.tokens[: reader.seen], context.tokens)
        if shared < reader.seen:
            reader.branch(context.tokens[:shared])
            reader.calibration.expect(0, ())
            reader.seen = shared
        context.memory[self.name] = reader

    def _propose(self, context: Context, gamma: int) -> Draft:
        reader: Reader | None = context.memory.get(self.name)
        if reader is None:
            reader = context.memory[self.name] = self.reader(context)
            if context.source is not None:
                self._prefill(reader, context.source.tokens)
        missing = context.tokens[reader.seen : reader.seen + CHUNK]
        if len(missing) > LONG:
            self._prefill(reader, missing)
        elif missing:
            reader.read(missing)
        reader.seen += len(missing)
        if reader.seen < len(context.tokens):
            return Draft.empty()
        reader.calibration.learn(context.tokens)
        if context.worth is None:
            return reader.guess(context, gamma).draft(self.name)
        return reader.guess(context, context.worth.depth).best(context.nodes, context.worth).draft(self.name)

    def _prefill(self, reader: Reader, tokens: Sequence[int]) -> None:
        """Read tokens, and count the time as spent on prompts."""
        began = time.perf_counter()
        reader.read(tokens)
        self.prefill_seconds += time.perf_counter() - began
