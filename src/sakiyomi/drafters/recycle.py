"""Drafts from the probable next tokens that the target's own passes have shown: Token Recycling.

Every row of a pass ranks the tokens that may follow one token, most of which are never written. The drafter keeps the
first of them by the last one and two tokens, for all requests, and grows a tree from them. It needs no training and no
text that repeats. Rows of refused nodes are kept, too.

Source: Luo et al. 2024 (arXiv 2408.08696), which keeps one token as the context and proposes one fixed tree. Here the
last two tokens are looked up first, and the tree follows calibrated chances, so that its size follows their worth.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from bisect import bisect
from collections.abc import Sequence

from sakiyomi.core.digests import tokenizer_digest
from sakiyomi.core.errors import LoadError
from sakiyomi.core.tree import TokenTree
from sakiyomi.drafters.base import Context, DrafterContext, Ranked
from sakiyomi.drafters.graph_file import Entries, GraphFile
from sakiyomi.drafters.guessed_tree import GuessedTree
from sakiyomi.drafters.text_base import Reader, TextDrafter

logger = logging.getLogger("sakiyomi")
SAVE_SECONDS = 30.0
KEPT = 8
"""Tokens that are kept of each row."""
MOST = 1 << 15
"""Contexts that are kept of each length, about 30 MB in all; the ones not seen for longest go."""
EDGES = tuple(map(math.log, (0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8, 0.92)))  # of kinds, by log chance
BINS = len(EDGES) + 1
_MIDDLES = (0.005, 0.015, 0.03, 0.06, 0.11, 0.2, 0.32, 0.5, 0.7, 0.86, 0.96)
PRIORS = tuple(share * middle for share in (0.7, 0.5, 0.5, 0.3, 0.3, 0.2) for middle in _MIDDLES)

Place = tuple[int, int]
"""The last two tokens; -1 where there is none."""


class TokenGraph:
    """The tokens that rows of the target ranked first after the last one and the last two tokens.

    Args:
        most: contexts that are kept of each length.
        after: entries of a file; None: there are none.

    Attributes:
        after: by the last two tokens, and by the last one; the ones seen last at the end.
    """

    def __init__(self, most: int = MOST, after: tuple[Entries, Entries] | None = None) -> None:
        self._most, self.after = most, after or ({}, {})

    def put(self, place: Place, ranked: Ranked) -> None:
        """Keep what a row has ranked."""
        for after, key in zip(self.after, keys_of(place), strict=True):
            after.pop(key, None)
            after[key] = ranked
            if len(after) > self._most:
                del after[next(iter(after))]

    def forget(self) -> None:
        """Drop everything."""
        for after in self.after:
            after.clear()

    def get(self, place: Place) -> list[tuple[int, int]]:
        """Tokens that may follow, each with the kind of guess that it is: those known of two tokens, then of one."""
        found: dict[int, int] = {}
        for order, (after, key) in enumerate(zip(self.after, keys_of(place), strict=True)):
            ranked = after.get(key)
            if ranked is None:
                continue
            first = 2 * BINS * (order + (order > 0 and bool(found)))
            for rank, (token, chance) in enumerate(zip(*ranked, strict=True)):
                found.setdefault(token, first + BINS * (rank > 0) + bisect(EDGES, chance))
        return list(found.items())


def keys_of(place: Place) -> tuple[int, int]:
    """The keys of a place in a graph."""
    before, last = place
    return (before + 1) << 32 | last, last


class Chances:
    """How often guesses of each kind were right, learnt from all requests of a drafter."""

    def __init__(self, priors: Sequence[float], weight: float = 20.0, memory: float = 0.999) -> None:
        self.chances = list(priors)
        self._hits = [prior * weight for prior in priors]
        self._tries = [weight] * len(priors)
        self._memory = memory

    def learn(self, guesses: Sequence[tuple[int, int]], token: int) -> None:
        """Learn which of the guesses at a place was right; ``guesses``: tokens and their kinds."""
        for guess, kind in guesses:
            hits = self._hits[kind] = self._hits[kind] * self._memory + (guess == token)
            tries = self._tries[kind] = self._tries[kind] * self._memory + 1.0
            self.chances[kind] = hits / tries


class RecycleReader(Reader):
    """The end of one text, and the places that its last draft guessed about.

    Args:
        graph: of the drafter.
        known: chances of the drafter's guesses, by kind.
    """

    def __init__(self, graph: TokenGraph, known: Chances) -> None:
        super().__init__(())
        self._graph, self._known = graph, known
        self._last: Place = (-1, -1)
        self._guessed: dict[Place, list[tuple[int, int]]] = {}

    def read(self, tokens: Sequence[int]) -> None:
        """See ``Reader.read``. Compares the last guesses with the tokens, up to the first place without any."""
        place, guessed = self._last, self._guessed
        for token in tokens:
            if place in guessed:
                self._known.learn(guessed[place], token)
            elif guessed:
                guessed = {}
            place = place[1], token
        self._last, self._guessed = place, {}

    def branch(self, head: Sequence[int]) -> None:
        """See ``Reader.branch``."""
        self._last, self._guessed = end_of(head), {}

    def guess(self, context: Context, depth: int) -> GuessedTree:
        """See ``Reader.guess``."""
        self._guessed = {}
        return self._grow(self._last, context, depth)

    def expand(self, place: Place) -> list[tuple[int, float, Place]]:
        """See ``Reader.expand``."""
        guesses = self._guessed.get(place)
        if guesses is None:
            guesses = self._guessed[place] = self._graph.get(place)
        chances, last = self._known.chances, place[1]
        return sorted([(token, chances[kind], (last, token)) for token, kind in guesses], key=_chance)


class RecycleDrafter(TextDrafter):
    """Drafts what the target's own rows ranked first after the same tokens.

    Args:
        file: where what they ranked is kept, prompts' tokens included; None: nowhere.
    """

    name = "recycle"
    leading = KEPT

    def __init__(self, file: GraphFile | None = None) -> None:
        self.graph = TokenGraph(after=file.read() if file is not None else None)
        self._known = {greedy: Chances(PRIORS) for greedy in (True, False)}
        self._file, self._fresh = file, TokenGraph()  # what is not in the file yet
        self._active: set[int] = set()
        self._saved = -SAVE_SECONDS
        if file is not None:
            weakref.finalize(self, _save, file, self._fresh)

    @classmethod
    def make(cls, argument: str | None, around: DrafterContext) -> RecycleDrafter:
        """A drafter with this file; without one where none is given."""
        if not argument:
            return cls()
        digest, vocab = tokenizer_digest(around.target.tokenizer), around.vocab_size
        return cls(GraphFile(argument, digest, vocab, MOST, min(KEPT, vocab)))

    def reader(self, context: Context) -> RecycleReader:
        """See ``TextDrafter.reader``."""
        self._active.add(context.id)
        return RecycleReader(self.graph, self._known[context.rule == "greedy"])

    def rank(self, context: Context, tree: TokenTree, rows: Sequence[Ranked]) -> None:
        """See ``Drafter.rank``."""
        began = time.perf_counter()
        first = end_of(context.tokens)
        places = [first]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            places.append((tree.tokens[parent] if parent >= 0 else first[1], token))
        for graph in (self.graph, self._fresh) if self._file is not None else (self.graph,):
            for place, ranked in zip(places, rows, strict=True):
                graph.put(place, ranked)
        self.forward_seconds += time.perf_counter() - began

    def end(self, context: Context) -> None:
        """Free the request's state. The file is written when no request runs, and at the drafter's end."""
        super().end(context)
        self._active.discard(context.id)
        if self._file is not None and not self._active and time.monotonic() - self._saved > SAVE_SECONDS:
            _save(self._file, self._fresh)
            self._saved = time.monotonic()


def end_of(tokens: Sequence[int]) -> Place:
    """The last two of them."""
    return tokens[-2] if len(tokens) > 1 else -1, tokens[-1] if tokens else -1


def _chance(guess: tuple[int, float, Place]) -> float:
    return -guess[1]


def _save(file: GraphFile, fresh: TokenGraph) -> None:
    """Add what was seen to the file."""
    try:
        if fresh.after[1]:
            file.save(fresh.after)
    except LoadError as error:
        logger.warning("what the target ranked is not remembered: %s", error)
    fresh.forget()
