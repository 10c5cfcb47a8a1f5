"""Drafts from a suffix automaton of prompt, output and, optionally, the texts of earlier requests.

Sources: SAM-Decoding (Hu et al. 2024, arXiv 2411.10666) for the automaton and the choice between this text and others
by the length of the match; SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) for trees of the most frequent
continuations whose size follows the match. The continuation that follows the place copied last comes first, see
``copy_source``. Chances are calibrated on the request's own text, see ``GuessCalibration``.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect
from collections.abc import Sequence
from functools import cached_property
from heapq import nlargest

from sakiyomi.core.digests import tokenizer_digest
from sakiyomi.core.errors import LoadError
from sakiyomi.drafters.automaton import ROOT, Cursor, SuffixAutomaton
from sakiyomi.drafters.base import Context, DrafterContext
from sakiyomi.drafters.copy_source import CopySource
from sakiyomi.drafters.guessed_tree import GuessedTree
from sakiyomi.drafters.memory import MemoryFile
from sakiyomi.drafters.native_texts import NativeAutomaton, doubles
from sakiyomi.drafters.text_base import Reader, TextDrafter

logger = logging.getLogger("sakiyomi")
SAVE_SECONDS = 5.0
LENGTHS = (0, 1, 2, 3, 4, 6, 9, 14)  # kinds of guesses: from each of these match lengths to the next ...
SHARES = (0.0, 0.3, 0.5, 0.7)  # ... and from each of these shares of the likeliest continuation to the next
WIDEST = 48  # where a place has more continuations, only the newest is considered
SIBLINGS = 4
# Share of right guesses by (length, share): of the first token, and of later ones where those before them were right.
# Means over texts of a model and edited sources (benchmarks/lookup_core.py prints them).
FIRST = (
    (0.0, 0.0, 0.0, 0.0),
    (0.14, 0.20, 0.25, 0.50),
    (0.17, 0.25, 0.44, 0.62),
    (0.20, 0.25, 0.52, 0.70),
    (0.20, 0.27, 0.55, 0.80),
    (0.20, 0.30, 0.75, 0.90),
    (0.30, 0.40, 0.82, 0.92),
    (0.40, 0.50, 0.90, 0.95),
)
LATER = (
    (0.0, 0.0, 0.0, 0.0),
    (0.15, 0.25, 0.40, 0.70),
    (0.15, 0.30, 0.48, 0.75),
    (0.17, 0.35, 0.58, 0.80),
    (0.25, 0.38, 0.68, 0.83),
    (0.25, 0.40, 0.78, 0.90),
    (0.30, 0.40, 0.85, 0.93),
    (0.40, 0.50, 0.93, 0.97),
)

# The same of tokens that the text copies, by length.
COPIED_FIRST = (0.0, 0.3, 0.45, 0.6, 0.7, 0.75, 0.82, 0.9)
COPIED_LATER = (0.0, 0.5, 0.6, 0.7, 0.75, 0.82, 0.88, 0.94)

Place = tuple[int, int, bool, int]
"""State, how many of the last tokens match, whether this is the end of the text itself, and the position in the text
that is copied (-1: none is).
"""


_PRIORS = [prior for row in (*LATER, *FIRST, COPIED_LATER, COPIED_FIRST) for prior in row]


class SuffixReader(Reader):
    """The automaton of one text, and a cursor in that of earlier texts.

    Args:
        shared: of earlier texts; None: there is none.
    """

    def __init__(self, shared: SuffixAutomaton | None = None) -> None:
        super().__init__(_PRIORS)
        self.own = SuffixAutomaton()
        self._shared = shared
        self._cursor = None if shared is None else Cursor(shared)
        self._source = CopySource(self.own.text)
        self._automaton = self.own

    def read(self, tokens: Sequence[int]) -> None:
        """See ``Reader.read``."""
        self.own.extend(tokens)
        self._source.read(tokens)
        if self._cursor is not None:
            self._cursor.read(tokens)

    def branch(self, head: Sequence[int]) -> None:
        """See ``Reader.branch``."""
        self.own.branch(len(head))
        self._source.branch(head, self.own.place)
        if self._shared is not None:
            self._cursor = Cursor(self._shared)
            self._cursor.read(head[-64:])

    def guess(self, context: Context, depth: int) -> GuessedTree:
        """See ``Reader.guess``."""
        self._automaton = self.own
        state, length = self.own.match()
        copied = self._source.next(length)
        if self._cursor is not None:
            self._cursor.refresh()
            if self._cursor.length > length:
                assert self._shared is not None
                self._automaton, state, length = self._shared, self._cursor.state, self._cursor.length
                copied = -1
        return self._grow((state, length, True, copied), context, depth)

    def expand(self, place: Place) -> list[tuple[int, float, Place]]:
        """See ``Reader.expand``."""
        automaton = self._automaton
        state, length, first, copied = place
        following = automaton.following[state]
        while not following and state > ROOT:
            # The run was seen at the end of the text only: use a shorter one.
            state = automaton.links[state]
            following = automaton.following[state]
            length = min(length, automaton.lengths[state])
        if state == ROOT:
            return []
        counts, newest = automaton.counts, automaton.newest(state)
        if len(following) == 1:
            ((token, behind),) = following.items()
            ranked = [(counts[behind] + 1.0, token, behind)]
            total = counts[behind] + 1.0
        elif len(following) <= WIDEST:
            # The newest counts once more, so it comes first among equals.
            ranked = [(counts[s] + (t == newest), t, s) for t, s in following.items()]
            total = sum(counts[s] for s in following.values()) + 1.0
            ranked = nlargest(SIBLINGS, ranked)
        elif newest in following:
            ranked = [(counts[following[newest]] + 1.0, newest, following[newest])]
            total = float(counts[state])
        else:
            return []
        onward = automaton.text[copied] if 0 <= copied < len(automaton.text) else -1
        if onward in following:
            weight, token, behind = next(
                (each for each in ranked if each[1] == onward), (counts[following[onward]], onward, following[onward])
            )
            ranked = [(weight, token, behind), *(each for each in ranked if each[1] != onward)][:SIBLINGS]
            # Kinds of copied tokens come behind the others.
            kind = (2 * len(SHARES) + first) * len(LENGTHS) + bisect(LENGTHS, length) - 1
        else:
            weight, token, behind = ranked[0]
            kind, copied = _kind(length, weight / (total + len(following)), first), -2
        chance = self.calibration.chances[kind]
        best = (behind, length + 1, False, copied + 1)
        self._note(place, kind, token, best)
        found = [(token, chance, best)]
        left = (1.0 - chance) / (total - weight + len(following))
        found += [(t, w * left, (s, length + 1, False, -1)) for w, t, s in ranked[1:]]
        return found


class SuffixDrafter(TextDrafter):
    """Drafts what followed the same tokens before, by the suffix automaton of prompt and output.

    Args:
        memory: texts of earlier requests, which are looked up too; the texts of new requests are added to it. None:
            only a request's own text is looked up.
    """

    name = "suffix"
    compiled = True

    def __init__(self, memory: MemoryFile | None = None) -> None:
        self._memory = memory
        self._active: set[int] = set()
        self._saved = -SAVE_SECONDS

    @cached_property
    def shared(self) -> SuffixAutomaton | NativeAutomaton | None:
        """The automaton of earlier texts; None: there is none."""
        return self._automaton()

    def _automaton(self) -> SuffixAutomaton | NativeAutomaton | None:
        if self._memory is None:
            return None
        found = SuffixAutomaton() if self.kernels is None else NativeAutomaton(self.kernels)
        for document in self._memory.documents:
            found.add(document.tokens)
        return found

    @classmethod
    def make(cls, argument: str | None, around: DrafterContext) -> SuffixDrafter:
        """A drafter with this memory file; with none where no file is given."""
        if not argument:
            return cls()
        return cls(MemoryFile(argument, tokenizer_digest(around.target.tokenizer), around.vocab_size))

    def add_reader(self, text: int, context: Context) -> None:
        """See ``TextDrafter.add_reader``. A request that uses other drafters alone is not remembered."""
        if context.asks is None or self.name in context.asks:
            self._active.add(context.id)
        earlier = self.shared.number if isinstance(self.shared, NativeAutomaton) else 0
        self.kernels.sk_read_suffix(text, earlier, doubles(_PRIORS))

    def reader(self, context: Context) -> SuffixReader:
        """See ``TextDrafter.reader``."""
        self._active.add(context.id)
        assert not isinstance(self.shared, NativeAutomaton)
        return SuffixReader(self.shared)

    def inherit(self, context: Context, earlier: Context) -> None:
        """See ``Drafter.inherit``. The later request's text includes the earlier one's, and is stored instead of it."""
        super().inherit(context, earlier)
        if earlier.id in self._active:
            self._active.remove(earlier.id)
            self._active.add(context.id)

    def end(self, context: Context) -> None:
        """Store the request's text. The file is written when no other request runs, else every few seconds."""
        super().end(context)
        if context.id not in self._active:
            return
        self._active.remove(context.id)
        if self._memory is None:
            return
        if self._memory.add(context.tokens):
            assert self.shared is not None
            self.shared.add(context.tokens)
            if self.shared.size > 2 * self._memory.most:
                # The oldest texts are no longer in the file.
                self.shared = self._automaton()
        if not self._active or time.monotonic() - self._saved > SAVE_SECONDS:
            self._saved = time.monotonic()
            try:
                self._memory.save()
            except LoadError as error:
                logger.warning("texts of requests are not remembered: %s", error)


def _kind(length: int, share: float, first: bool) -> int:
    """The index of a guess among ``LATER`` and ``FIRST``, row by row."""
    return ((bisect(LENGTHS, length) - 1) + first * len(LENGTHS)) * len(SHARES) + bisect(SHARES, share) - 1
