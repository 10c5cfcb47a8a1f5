"""Drafts from counts of n-grams, of the text so far or of trained tables (see ``ngram_file``).

A token's chance is interpolated over all runs of last tokens, from the longest known one down to the empty one. A run
with more different continuations gives more weight to the next shorter one (Witten and Bell 1991, method C). These are
the simplest drafts of Leviathan et al. 2023 (arXiv 2211.17192, section 4.1). Tokens are chosen, not drawn: point
masses, which are lossless under every rule. Under "coupled" the tokens with the largest log q + noise of the position
are chosen.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from sakiyomi.core.fingerprint import tokenizer_digest
from sakiyomi.drafters.base import Context, DrafterContext
from sakiyomi.drafters.guess_calibration import GuessCalibration
from sakiyomi.drafters.guessed_tree import GuessedTree, grow
from sakiyomi.drafters.text_base import FLOOR, TextDrafter

__all__ = ["NgramDrafter", "NgramReader", "OnlineTables", "Tables", "run_number"]

ORDER = 4
SIBLINGS = 4
WIDEST = 16  # tokens that compete under the rule "coupled"
EDGES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # borders between kinds of guesses, by chance
_MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
_FACTOR, _MASK = 0x5851F42D4C957F2D, (1 << 63) - 1

Place = tuple[tuple[int, ...], int]
"""The last tokens, and how many of them are guesses."""


def run_number(run: Sequence[int]) -> int:
    """A hash of 63 bits for a run of tokens; a collision only makes a guess worse."""
    number = 0
    for token in run:
        number = (number * _FACTOR + token + 1) & _MASK
    return number


Seen = tuple[int, int, Sequence[int], Mapping[int, int]]
"""How often a run was continued, by how many different tokens, the most frequent of them in order, and their counts."""


class Tables(Protocol):
    """What followed each run of tokens.

    Attributes:
        order: tokens of the longest n-gram.
    """

    order: int

    def after(self, run: tuple[int, ...]) -> Seen | None:
        """What followed a run; None: it was never seen, or nothing followed."""
        ...


class OnlineTables:
    """N-gram counts of a growing text.

    Args:
        order: tokens of the longest n-gram.
    """

    def __init__(self, order: int = ORDER) -> None:
        self.order = order
        # By run: how often it was continued, counts by token, and its most frequent continuations in order.
        self._runs: dict[tuple[int, ...], tuple[list[int], dict[int, int], list[int]]] = {}

    def read(self, head: Sequence[int], tokens: Sequence[int]) -> None:
        """Count the tokens that follow ``head``."""
        runs, longest = self._runs, self.order - 1
        last = tuple(head[-longest:]) if longest else ()
        for token in tokens:
            for start in range(len(last) + 1):
                run = last[start:]
                entry = runs.get(run)
                if entry is None:
                    runs[run] = ([1], {token: 1}, [token])
                    continue
                total, counts, top = entry
                total[0] += 1
                count = counts[token] = counts.get(token, 0) + 1
                if token not in top:
                    if len(top) < WIDEST:
                        top.append(token)
                    elif counts[top[-1]] < count:
                        top[-1] = token
                    else:
                        continue
                place = top.index(token)
                while place and counts[top[place - 1]] <= count:  # of equals the newest comes first
                    top[place - 1], top[place] = token, top[place - 1]
                    place -= 1
            last = (*last, token)[-longest:] if longest else ()

    def after(self, run: tuple[int, ...]) -> Seen | None:
        """See ``Tables.after``."""
        entry = self._runs.get(run)
        if entry is None:
            return None
        total, counts, top = entry
        return total[0], len(counts), top, counts


class NgramReader:
    """Guesses about one text.

    Args:
        tables: trained ones; None: the text itself is counted.
        vocab_size: of the target.
    """

    def __init__(self, tables: Tables | None, vocab_size: int) -> None:
        self._online = OnlineTables() if tables is None else None
        self._tables: Tables = tables or self._online  # type: ignore[assignment]
        self._vocab_size = vocab_size
        self._calibration = GuessCalibration(_MIDDLES * 2)
        self._last: tuple[int, ...] = ()
        self._context: Context | None = None
        self._row = np.zeros(0, np.float32)
        self._path: list[tuple[int, int]] = []
        self._end: Place = ((), 0)

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
        self._calibration.learn(context.tokens)
        self._context = context
        self._path, self._end = [], (self._last, 0)
        found = grow(self._end, self.expand, depth, context.nodes, FLOOR, context.stop_ids)
        self._calibration.expect(len(context.tokens), self._path)
        return found

    def expand(self, place: Place) -> list[tuple[int, float, Place]]:
        """The continuations of a place, see ``guessed_tree.Expand``."""
        last, guessed = place
        context = self._context
        assert context is not None
        noisy = context.rule == "coupled"
        chances = self.chances(last, WIDEST if noisy else SIBLINGS)
        if noisy and chances:
            ranked = self._noisy(context, chances, len(context.tokens) + guessed)
        else:
            ranked = sorted(chances.items(), key=lambda item: -item[1])[:SIBLINGS]
        known, later = self._calibration.chances, len(_MIDDLES) * (guessed > 0)
        found = []
        for token, chance in ranked:
            kind = bisect(EDGES, chance) + later
            found.append((token, known[kind], (self._end_of((*last, token)), guessed + 1)))
        if found and place is self._end:
            self._path.append((bisect(EDGES, ranked[0][1]) + later, found[0][0]))
            self._end = found[0][2]
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

    def __init__(self, vocab_size: int, tables: Tables | None = None) -> None:
        self._vocab_size, self._tables = vocab_size, tables

    @classmethod
    def make(cls, argument: str, around: DrafterContext) -> NgramDrafter:
        """A drafter with the tables of this file; with the request's own counts where no file is given."""
        from sakiyomi.drafters.ngram_file import read_tables

        if not argument:
            return cls(around.vocab_size)
        tables = read_tables(argument, tokenizer_digest(around.target.tokenizer), around.vocab_size)
        return cls(around.vocab_size, tables)

    def reader(self, context: Context) -> NgramReader:
        """See ``TextDrafter.reader``."""
        return NgramReader(self._tables, self._vocab_size)
