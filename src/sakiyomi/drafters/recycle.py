"""Drafts from the probable next tokens that the target's own passes have shown: Token Recycling.

Every row of a pass ranks the tokens that may follow, most of which are never written. The drafter keeps the first of
them by the last one, two and three tokens, for all requests, and grows a tree from them. It needs no training and no
text that repeats. Rows of refused nodes are kept, too.

Source: Luo et al. 2024 (arXiv 2408.08696), which keeps one token as the context and proposes one fixed tree. Here the
longest known context counts, and the tree follows calibrated chances, so that its size follows their worth.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from bisect import bisect
from collections.abc import Sequence
from functools import cached_property

from sakiyomi.core.digests import tokenizer_digest
from sakiyomi.core.errors import LoadError
from sakiyomi.core.tree import TokenTree
from sakiyomi.drafters.base import Context, DrafterContext, Ranked
from sakiyomi.drafters.graph_file import LENGTHS, Entries, GraphFile
from sakiyomi.drafters.guessed_tree import GuessedTree
from sakiyomi.drafters.native_texts import KEPT, NativeGraph
from sakiyomi.drafters.ngram_file import run_number
from sakiyomi.drafters.text_base import Reader, TextDrafter

logger = logging.getLogger("sakiyomi")
SAVE_SECONDS = 30.0
MOST = 1 << 15
"""Contexts that are kept of each length, about 40 MB in all; the ones not seen for longest go."""
EDGES = tuple(map(math.log, (0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8, 0.92)))  # of kinds, by log chance
BINS = len(EDGES) + 1
# Share of right guesses by the length of the context, 3, 2 and 1, of a row's first token and of its others, by the
# chance that the row gave them. Means over chats of a small model.
PRIORS = (
    *(0.25, 0.25, 0.25, 0.4, 0.45, 0.48, 0.52, 0.64, 0.69, 0.84, 0.84),
    *(0.015, 0.04, 0.04, 0.04, 0.1, 0.15, 0.27, 0.27, 0.3, 0.3, 0.3),
    *(0.1, 0.1, 0.1, 0.1, 0.12, 0.18, 0.2, 0.34, 0.38, 0.57, 0.57),
    *(0.03, 0.05, 0.06, 0.06, 0.07, 0.17, 0.25, 0.25, 0.3, 0.3, 0.3),
    *(0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.14, 0.17, 0.21, 0.3, 0.32),
    *(0.03, 0.03, 0.045, 0.05, 0.07, 0.11, 0.14, 0.18, 0.2, 0.2, 0.2),
)

Place = tuple[int, ...]
"""The last tokens, as many as the longest context has; fewer at a text's beginning."""


class TokenGraph:
    """The tokens that rows of the target ranked first after the last three, two and one tokens.

    Args:
        most: contexts that are kept of each length.
        after: entries of a file; None: there are none.

    Attributes:
        after: by ``run_number`` of the context, the longest contexts first; the ones seen last at the end.
    """

    def __init__(self, most: int = MOST, after: tuple[Entries, ...] | None = None) -> None:
        self._most, self.after = most, after or tuple({} for _ in range(LENGTHS))

    def put(self, place: Place, ranked: Ranked) -> None:
        """Keep what a row has ranked."""
        for length, after in zip(range(LENGTHS, 0, -1), self.after, strict=True):
            if length > len(place):
                continue
            key = run_number(place[-length:])
            after.pop(key, None)
            after[key] = ranked
            if len(after) > self._most:
                del after[next(iter(after))]

    def get(self, place: Place) -> list[tuple[int, int]]:
        """Tokens that followed the longest known context, the likeliest first, each with the kind of guess it is."""
        first = 0
        for length, after in zip(range(LENGTHS, 0, -1), self.after, strict=True):
            ranked = after.get(run_number(place[-length:])) if length <= len(place) else None
            if ranked is not None:
                found = enumerate(zip(*ranked, strict=True))
                return [(token, first + BINS * (rank > 0) + bisect(EDGES, chance)) for rank, (token, chance) in found]
            first += 2 * BINS
        return []

    def forget(self) -> None:
        """Drop everything."""
        for after in self.after:
            after.clear()

    def fresh(self) -> tuple[Entries, ...]:
        """What is there, which counts as written from now on."""
        found = tuple(after.copy() for after in self.after)
        self.forget()
        return found


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
        self._last: Place = ()
        self._guessed: dict[Place, list[tuple[int, int]]] = {}

    def read(self, tokens: Sequence[int]) -> None:
        """See ``Reader.read``. Compares the last guesses with the tokens, up to the first place without any."""
        place, guessed = self._last, self._guessed
        for token in tokens:
            if place in guessed:
                self._known.learn(guessed[place], token)
            elif guessed:
                guessed = {}
            place = (*place, token)[-LENGTHS:]
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
        chances, last = self._known.chances, place[1 - LENGTHS :]
        return sorted([(token, chances[kind], (*last, token)) for token, kind in guesses], key=_chance)


class RecycleDrafter(TextDrafter):
    """Drafts what the target's own rows ranked first after the same tokens.

    Args:
        file: where what they ranked is kept, prompts' tokens included; None: nowhere.
    """

    name = "recycle"
    compiled = True
    leading = KEPT

    def __init__(self, file: GraphFile | None = None) -> None:
        self._after = file.read() if file is not None else None
        self._known = {greedy: Chances(PRIORS) for greedy in (True, False)}
        self._file = file
        self._active: set[int] = set()
        self._saved = -SAVE_SECONDS

    @cached_property
    def graph(self) -> TokenGraph | NativeGraph:
        """What rows have ranked."""
        after, self._after = self._after, None
        return TokenGraph(after=after) if self.kernels is None else NativeGraph(self.kernels, MOST, after, PRIORS)

    @cached_property
    def _fresh(self) -> TokenGraph | NativeGraph:
        """What is not in the file yet."""
        fresh = TokenGraph() if isinstance(self.graph, TokenGraph) else self.graph
        if self._file is not None:
            weakref.finalize(self, _save, self._file, fresh)
        return fresh

    @classmethod
    def make(cls, argument: str | None, around: DrafterContext) -> RecycleDrafter:
        """A drafter with this file; without one where none is given."""
        if not argument:
            return cls()
        digest, vocab = tokenizer_digest(around.target.tokenizer), around.vocab_size
        return cls(GraphFile(argument, digest, vocab, MOST, min(KEPT, vocab)))

    def add_reader(self, text: int, context: Context) -> None:
        """See ``TextDrafter.add_reader``."""
        self._active.add(context.id)
        assert isinstance(self.graph, NativeGraph)
        self.kernels.sk_read_recycled(text, self.graph.number, context.rule == "greedy")

    def reader(self, context: Context) -> RecycleReader:
        """See ``TextDrafter.reader``."""
        self._active.add(context.id)
        assert isinstance(self.graph, TokenGraph)
        return RecycleReader(self.graph, self._known[context.rule == "greedy"])

    def rank(self, context: Context, tree: TokenTree, rows: Sequence[Ranked]) -> None:
        """See ``Drafter.rank``."""
        began = time.perf_counter()
        first = end_of(context.tokens)
        places = [first]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            places.append((*places[parent + 1], token)[-LENGTHS:])
        for graph in {self.graph, self._fresh} if self._file is not None else (self.graph,):
            for place, ranked in zip(places, rows, strict=True):
                graph.put(place, ranked)
        self.forward_seconds += time.perf_counter() - began

    def forget(self) -> None:
        """See ``Drafter.forget``."""
        self.graph.forget()
        self._known.update({greedy: Chances(PRIORS) for greedy in self._known})

    def end(self, context: Context) -> None:
        """Free the request's state. The file is written when no request runs, and at the drafter's end."""
        super().end(context)
        self._active.discard(context.id)
        if self._file is not None and not self._active and time.monotonic() - self._saved > SAVE_SECONDS:
            _save(self._file, self._fresh)
            self._saved = time.monotonic()


def end_of(tokens: Sequence[int]) -> Place:
    """The last of these tokens, as a place."""
    return tuple(tokens[-LENGTHS:])


def _chance(guess: tuple[int, float, Place]) -> float:
    return -guess[1]


def _save(file: GraphFile, fresh: TokenGraph | NativeGraph) -> None:
    """Add what was seen to the file."""
    try:
        if (entries := fresh.fresh())[-1]:
            file.save(entries)
    except LoadError as error:
        logger.warning("what the target ranked is not remembered: %s", error)
