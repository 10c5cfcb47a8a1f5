"""Drafts from counts of n-grams, of the text so far or of trained tables (see ``ngram_file``).

A token's chance is interpolated over all runs of last tokens, from the longest known one down to the empty one. A run
with more different continuations gives more weight to the next shorter one (Witten and Bell 1991, method C). These are
the simplest drafts of Leviathan et al. 2023 (arXiv 2211.17192, section 4.1). Tokens are chosen, not drawn: point
masses, which are lossless under every rule. Under "coupled" the tokens with the largest log q + noise of the position
are chosen.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sakiyomi.core.digests import tokenizer_digest
from sakiyomi.drafters.base import Context, DrafterContext
from sakiyomi.drafters.guessed_tree import GuessedTree
from sakiyomi.drafters.native_texts import NativeTables, doubles
from sakiyomi.drafters.ngram_file import ORDER, WIDEST, FileTables, OnlineTables, Tables, read_tables
from sakiyomi.drafters.text_base import Reader, TextDrafter

__all__ = ["NgramDrafter", "NgramReader", "Tables"]

SIBLINGS = 4
EDGES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # borders between kinds of guesses, by chance
_MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))

Place = tuple[tuple[int, ...], int]
"""The last tokens, and how many of them are guesses."""


class NgramReader(Reader):
    """Guesses about one text.

    Args:
        tables: trained ones; None: the text itself is counted.
        vocab_size: of the target.
    """

    def __init__(self, tables: Tables | None, vocab_size: int) -> None:
        super().__init__(_MIDDLES * 2)
        self._online = OnlineTables() if tables is None else None
        self._tables: Tables = tables or self._online  # type: ignore[assignment]
        self._vocab_size = vocab_size
        self._last: tuple[int, ...] = ()
        self._context: Context | None = None
        self._row = np.zeros(0, np.float32)

    def read(self, tokens: Sequence[int]) -> None:
        """See ``Reader.read``."""
        if self._online is not None:
            self._online.read(self._last, tokens)
        self._last = self._end_of((*self._last, *tokens))

    def branch(self, head: Sequence[int]) -> None:
        """See ``Reader.branch``."""
        self._last = self._end_of(head)

    def guess(self, context: Context, depth: int) -> GuessedTree:
        """See ``Reader.guess``."""
        self._context = context
        return self._grow((self._last, 0), context, depth)

    def expand(self, place: Place) -> list[tuple[int, float, Place]]:
        """See ``Reader.expand``."""
        last, guessed = place
        context = self._context
        assert context is not None
        noisy = context.rule == "coupled"
        chances = self.chances(last, WIDEST if noisy else SIBLINGS)
        if noisy and chances:
            ranked = self._noisy(context, chances, len(context.tokens) + guessed)
        else:
            ranked = sorted(chances.items(), key=lambda item: -item[1])[:SIBLINGS]
        known, later = self.calibration.chances, len(_MIDDLES) * (guessed > 0)
        found = []
        for token, chance in ranked:
            kind = bisect(EDGES, chance) + later
            found.append((token, known[kind], (self._end_of((*last, token)), guessed + 1)))
        if found:
            self._note(place, bisect(EDGES, ranked[0][1]) + later, found[0][0], found[0][2])
        return found

    def chances(self, last: tuple[int, ...], width: int) -> dict[int, float]:
        """Interpolated chances of about ``width`` tokens, the most frequent ones after the longest known runs."""
        after = self._tables.after
        found = [seen for start in range(len(last) + 1) if (seen := after(last[start:])) is not None]
        if len(found) < 2 <= self._tables.order:
            return {}  # the most frequent tokens of the whole text say nothing about this place
        tokens: dict[int, None] = {}
        for _, _, top, _ in found:
            tokens.update(dict.fromkeys(top[:width]))
            if len(tokens) >= width:
                break
        base, chances = 1.0 / self._vocab_size, {}
        steps = [(1.0 / (total + kinds), kinds / (total + kinds), counts) for total, kinds, _, counts in found[::-1]]
        for token in tokens:
            chance = base
            for scale, back, counts in steps:
                chance = chance * back + counts.get(token, 0) * scale
            chances[token] = chance
        return chances

    def _end_of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The last tokens, as many as the longest run that the tables know."""
        longest = self._tables.order - 1
        return tuple(tokens[-longest:]) if longest else ()

    def _noisy(self, context: Context, chances: dict[int, float], position: int) -> list[tuple[int, float]]:
        """The tokens with the largest log chance + noise of the position, as the target will choose among its own."""
        if self._row.size != self._vocab_size:
            self._row = np.zeros(self._vocab_size, np.float32)
        tokens = sorted(chances)
        support = np.array(tokens, np.intp)
        weights = np.array([chances[token] for token in tokens], np.float32)
        self._row[support] = weights ** np.float32(1.0 / max(context.params.temperature, 0.05))
        chosen = context.noise.top(position, self._row, SIBLINGS, support)
        self._row[support] = 0.0
        return [(token, chances[token]) for token in chosen]


class NgramDrafter(TextDrafter):
    """Drafts the likeliest tokens of n-gram tables.

    Args:
        vocab_size: of the target.
        tables: trained ones; None: each request counts its own text.
    """

    name = "ngram"
    compiled = True

    def __init__(self, vocab_size: int, tables: Tables | None = None) -> None:
        self._vocab_size, self._tables = vocab_size, tables

    @cached_property
    def kernels(self) -> Any:
        """See ``TextDrafter.kernels``; tables of another kind are Python's."""
        return super().kernels if self._tables is None or isinstance(self._tables, FileTables) else None

    @cached_property
    def _native_tables(self) -> NativeTables | None:
        """The trained tables in the kernels; None: there are none."""
        return NativeTables(self.kernels, *self._tables.arrays()) if isinstance(self._tables, FileTables) else None

    @classmethod
    def make(cls, argument: str | None, around: DrafterContext) -> NgramDrafter:
        """A drafter with the tables of this file; with the request's own counts where no file is given."""
        if not argument:
            return cls(around.vocab_size)
        tables = read_tables(argument, tokenizer_digest(around.target.tokenizer), around.vocab_size)
        return cls(around.vocab_size, tables)

    def add_reader(self, text: int, context: Context) -> None:
        """See ``TextDrafter.add_reader``."""
        tables = self._native_tables.number if self._native_tables is not None else 0
        self.kernels.sk_read_ngrams(text, tables, ORDER, self._vocab_size, doubles(_MIDDLES * 2))

    def reader(self, context: Context) -> NgramReader:
        """See ``TextDrafter.reader``."""
        return NgramReader(self._tables, self._vocab_size)
