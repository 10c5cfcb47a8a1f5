"""Drafts from text in the compiled kernels: what `kernels/texts.h` reads and guesses for a request.

It does the same as the readers of the text drafters and as ``MergedDrafter``, which remain for processes without these
kernels, and for drafts that a model shares.
"""

from __future__ import annotations

import ctypes
import struct
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sakiyomi.cache.prefix import alike
from sakiyomi.core.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.drafters.base import Context, Drafter, Ranked
from sakiyomi.drafters.draft_length import TokenValue
from sakiyomi.drafters.graph_file import LENGTHS, Entries
from sakiyomi.kernels.native import numbers

CHUNK = 4096  # most tokens that are read in one round, so that other requests do not wait long
LONG = 64  # more tokens than these at once are a prompt
KEPT = 4  # tokens of a row that `recycle` keeps; others are hardly ever worth a node
_WANTED = struct.Struct("=5qdQ")  # Wanted in readers.h
NOTHING = bytes(_WANTED.size)  # is wanted


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    """Numbers as the kernels take them."""
    return (ctypes.c_double * len(values))(*values)


def freed(owner: object, free: Any, number: int) -> None:
    """Have what the kernels hold for an object freed with it; not when the process ends, as rounds may still run."""
    weakref.finalize(owner, free, number).atexit = False


class Wanted(NamedTuple):
    """What is wanted of a request's draft, see `Wanted` in `texts.h`.

    Attributes:
        depth, nodes: at most.
        most: nodes of several drafters' guesses together.
        members: bits of the drafters that are asked.
        worth: what a token is worth, where that is weighed.
        seconds: of a pass by nodes of each request's draft, likewise.
    """

    depth: int
    nodes: int
    most: int
    members: int
    worth: TokenValue | None
    seconds: Any

    def pack(self) -> bytes:
        """As the kernels take it."""
        rate = self.worth.rate if self.worth is not None else 0.0
        table = ctypes.addressof(self.seconds) if self.seconds is not None else 0
        return _WANTED.pack(self.depth, self.nodes, self.most, self.worth is not None, self.members, rate, table)


class NativeText:
    """A request's text in the kernels.

    Args:
        kernels: the library.
        shared: what the members of a merged drafter share; 0: there is one drafter.

    Attributes:
        number: its own there.
    """

    def __init__(self, kernels: Any, shared: int) -> None:
        self.kernels, self.number = kernels, int(kernels.sk_text(shared))
        self._seen = ctypes.c_int64.from_address(kernels.sk_text_seen(self.number))
        freed(self, kernels.sk_free_text, self.number)

    @property
    def seen(self) -> int:
        """How many of the request's tokens were read."""
        return self._seen.value

    def judged(self, context: Context) -> None:
        """Its drafts are judged as this request says."""
        how = context.rule == "coupled", context.noise.state, context.params.temperature
        self.kernels.sk_text_judged(self.number, *how)

    def read(self, tokens: Sequence[int], *, own: bool = True) -> None:
        """Learn the next tokens of the text; those that are not its own come before it."""
        self.kernels.sk_text_read(self.number, len(tokens), numbers(tokens))
        if own:
            self._seen.value += len(tokens)

    def branch(self, head: Sequence[int]) -> None:
        """Continue behind ``head``, the beginning of what was read; what followed it becomes another text."""
        self.kernels.sk_text_branch(self.number, len(head), numbers(head))


class Member(Protocol):
    """A drafter with a reader in the kernels, see ``TextDrafter``."""

    name: str
    forward_seconds: float
    prefill_seconds: float

    @property
    def kernels(self) -> Any:
        """The kernels."""
        ...

    def add_reader(self, text: int, context: Context) -> None:
        """Add its reader to a text."""
        ...


class NativeTexts:
    """The texts of a drafter's requests.

    Args:
        drafter: whose they are; it is not kept alive.
        members: whose readers read each text: the drafter itself, or those that it merges.
        count: of all drafters that it merges, of which another one may come behind these.

    Attributes:
        members: see above.
        kind: of its drafts.
    """

    def __init__(self, drafter: Drafter, members: Sequence[Member], count: int = 1) -> None:
        self._drafter, self.members, self._kernels = weakref.proxy(drafter), members, members[0].kernels
        self.kind: DraftKind = drafter.kind
        self._shared, self._count = 0, count
        if self.kind == "merged":
            self._shared = int(self._kernels.sk_shared(count))
            freed(self, self._kernels.sk_free_shared, self._shared)
        self._counts, self._ints = (ctypes.c_int64 * 2)(), ctypes.POINTER(ctypes.c_int64)()
        self._doubles = ctypes.POINTER(ctypes.c_double)()
        self._priced: tuple[Any, int] = None, 0  # what the table is of
        self._table: Any = ()

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        began = time.perf_counter()
        guessed = [self._guess(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]
        drafts = [Draft.empty() if each is None else self._draft(*each) for each in guessed]
        self.spent(time.perf_counter() - began)
        return drafts

    def spent(self, seconds: float) -> None:
        """Add seconds to those of the drafter, whose clock is that of its members."""
        self.members[0].forward_seconds += seconds

    def wanted(self, context: Context, gamma: int, room: int | None = None) -> Wanted:
        """What is wanted of a draft of so many levels; merged chains may be a tree, of ``room`` nodes at most."""
        worth, asks, most = context.worth, context.asks, context.nodes
        if most <= gamma:
            most = gamma * self._count
            most = most if room is None else min(most, max(context.nodes, room))
        every = asks is None or self.kind != "merged"
        names = [member.name for member in self._drafter.members or self.members]
        mask = sum([1 << i for i, name in enumerate(names) if every or name in (asks or ())])
        if worth is None:
            return Wanted(gamma, context.nodes, most, mask, None, None)
        costs, nodes = worth.costs, max(context.nodes, most)
        if self._priced != (costs.score, costs.batch) or nodes >= len(self._table):
            self._table = doubles([costs.score(costs.batch * (count + 1)) for count in range(nodes + 1)])
            self._priced = costs.score, costs.batch
        return Wanted(worth.depth, context.nodes, most, mask, worth, self._table)

    def read(self, context: Context) -> NativeText | None:
        """A request's text, of which no more than a few tokens are unread; None: there are more than a round reads."""
        name = self._drafter.name  # which may change until it is first used
        text: NativeText | None = context.memory.get(name)
        if text is None:
            text = NativeText(self._kernels, self._shared)
            text.judged(context)
            for member in self.members:
                member.add_reader(text.number, context)
            context.memory[name] = text
            if context.source is not None:
                self._prefill(text, context.source.tokens, own=False)
        missing = len(context.tokens) - text.seen
        if missing <= LONG:
            return text
        self._prefill(text, context.tokens[text.seen : text.seen + CHUNK])
        return text if missing <= CHUNK else None

    def forget(self, context: Context) -> None:
        """Forget a request's text, which may hold more than the request: it is read anew."""
        context.memory.pop(self._drafter.name, None)

    def inherit(self, context: Context, earlier: Context) -> None:
        """See ``Drafter.inherit``."""
        name = self._drafter.name
        text: NativeText | None = earlier.memory.pop(name, None)
        if text is None:
            return
        shared = alike(earlier.tokens[: text.seen], context.tokens)
        if shared < text.seen:
            text.branch(context.tokens[:shared])
        text.judged(context)
        context.memory[name] = text

    def _guess(self, context: Context, gamma: int) -> tuple[NativeText, Wanted] | None:
        """Guess what follows a text; None: there is too much of it to read. All texts' members learn before the first
        draft is merged.
        """
        text = self.read(context)
        if text is None:
            return None
        if missing := context.tokens[text.seen :]:
            text.read(missing)
        wanted, ends = self.wanted(context, gamma), numbers([*context.stop_ids])
        self._kernels.sk_text_guess(text.number, wanted.pack(), len(ends), ends)
        return text, wanted

    def _draft(self, text: NativeText, wanted: Wanted) -> Draft:
        found = self._counts, ctypes.byref(self._ints), ctypes.byref(self._doubles)
        self._kernels.sk_text_draft(text.number, wanted.pack(), *found)
        nodes, draws = self._counts
        if not nodes:
            return Draft.empty()
        whole, chances = self._ints[: 2 * (nodes + draws)], self._doubles[:draws]
        names = [self.members[member].name for member in whole[2 * nodes + draws :]]
        drawn = map(Draw, whole[2 * nodes : 2 * nodes + draws], names, [None] * draws, chances)
        return Draft(TokenTree(tuple(whole[:nodes]), tuple(whole[nodes : 2 * nodes])), self.kind, tuple(drawn))

    def _prefill(self, text: NativeText, tokens: Sequence[int], *, own: bool = True) -> None:
        """Read tokens, and count the time as spent on prompts."""
        began = time.perf_counter()
        text.read(tokens, own=own)
        self.members[0].prefill_seconds += time.perf_counter() - began


class NativeGraph:
    """What rows have ranked first, in the kernels; see ``TokenGraph``.

    Args:
        kernels: the library.
        most: contexts that are kept of each length.
        after: entries of a file; None: there is none.
        priors: initial chance of each kind of guess.

    Attributes:
        number: its own there.
    """

    def __init__(self, kernels: Any, most: int, after: tuple[Entries, ...] | None, priors: Sequence[float]) -> None:
        self._kernels, self._priors = kernels, doubles(priors)
        self.number = int(kernels.sk_recycled(most, after is not None, len(priors), self._priors))
        freed(self, kernels.sk_free_recycled, self.number)
        for which, entries in enumerate(after or ()):
            counts = np.array([len(tokens) for tokens, _ in entries.values()], np.int64)
            rows = np.zeros((len(entries), KEPT), np.int64), np.zeros((len(entries), KEPT))
            for at, ranked in enumerate(entries.values()):
                for table, found in zip(rows, ranked, strict=True):
                    table[at, : counts[at]] = found[:KEPT]
            keys = np.array([*entries], np.uint64)
            given = (len(entries), *(array.ctypes.data for array in (keys, counts, *rows)))
            kernels.sk_recycled_load(self.number, which, *given)

    def put(self, place: Sequence[int], ranked: Ranked) -> None:
        """Keep what a row has ranked."""
        tokens, logs = ranked
        given = len(place), numbers(place), len(tokens), numbers(tokens), doubles(logs)
        self._kernels.sk_recycled_put(self.number, *given)

    def fresh(self) -> tuple[Entries, ...]:
        """What is not in the file yet; it counts as written from now on."""
        found = []
        for which in range(LENGTHS):
            count = int(self._kernels.sk_recycled_count(self.number, which))
            keys, counts, tokens = (
                (ctypes.c_uint64 * count)(),
                (ctypes.c_int64 * count)(),
                (ctypes.c_int64 * KEPT * count)(),
            )
            logs = (ctypes.c_double * KEPT * count)()
            self._kernels.sk_recycled_fresh(self.number, which, count, keys, counts, tokens, logs)
            rows = zip(keys, counts, tokens, logs, strict=True)
            found.append({key: (own[:length], chances[:length]) for key, length, own, chances in rows})
        self._kernels.sk_recycled_forget(self.number, 1, 0, None)
        return tuple(found)

    def forget(self) -> None:
        """Drop everything."""
        self._kernels.sk_recycled_forget(self.number, 0, len(self._priors), self._priors)


class NativeTables:
    """Trained tables of n-grams, in the kernels; see ``FileTables.arrays``, whose memory they read.

    Attributes:
        number: its own there.
    """

    def __init__(
        self, kernels: Any, order: int, parts: Sequence[Sequence[Any]], unigrams: Any, after: tuple[Any, ...]
    ) -> None:
        self._held = parts, unigrams
        places = [place for own in parts for place in (len(own[0]), *(part.ctypes.data for part in own))]
        total, kinds, top, _ = after
        given = numbers([*places, total, kinds, len(unigrams), unigrams.ctypes.data, *top])
        self.number = int(kernels.sk_ngrams(order, given, len(top)))
        freed(self, kernels.sk_free_ngrams, self.number)


class NativeAutomaton:
    """The automaton of earlier texts, in the kernels; see ``SuffixAutomaton``.

    Attributes:
        number: its own there.
        size: tokens.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels, self.number, self.size = kernels, int(kernels.sk_automaton()), 0
        freed(self, kernels.sk_free_automaton, self.number)

    def add(self, tokens: Sequence[int]) -> None:
        """Add another text."""
        self._kernels.sk_remember(self.number, len(tokens), numbers(tokens))
        self.size += len(tokens)
