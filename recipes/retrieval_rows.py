"""Rows for the retrieval model: facts in filler, and behind it many questions with their answers.

A row depends on the seed, the step and its own number alone: nothing is kept, a resumed run sees the same rows. Rows
are put together from encoded parts; tokens of the whole text begin and end where the parts do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.train.long_tasks.example import NOISE, Fact, Supply, Texts
from sakiyomi.train.long_tasks.made import ADJECTIVES, NOUNS, digits, keys, locker, needle, pair, repeated
from sakiyomi.train.rows import check_unchanged

KINDS = ("passkey", "number", "kv", "kv-dense", "multikey", "recall", "copy", "text")
SHORT_SHARES = (0.08, 0.10, 0.14, 0.08, 0.14, 0.36, 0.08, 0.02)
LONG_SHARES = (0.08, 0.12, 0.18, 0.24, 0.18, 0.16, 0.02, 0.02)
PARTED_KINDS, PARTED_SHARES = ("kv", "kv-dense", "multikey"), (0.3, 0.4, 0.3)
SHORT = 128
"""Up to this length rows hold little, and are mostly such as give many answers."""

NOTHING, KNOWN, ANSWER, OTHER, WANTED = 0, 1, 2, 3, 4
"""What a token is: padding, text, (part of) an answer; behind a question in front, (part of) the value in the text of
another key than those that are asked for, or of one of them."""

QUERY_FIRST = 0.3
"""Share of the rows with their questions in front, too."""

PARTED_EVERY = 2
"""One step of so many has parted rows: a text, and as long as that its questions (see `retriever.parted_pass`)."""

PARTED_FIRST = 0.5
"""Share of the parted rows with their questions in front, too."""

Part = tuple[str, int]
Roles = npt.NDArray[np.int64]


class RetrievalRows:
    """See `rows.Batches`.

    Args:
        documents: texts for filler and for rows of text.
        tokenizer: of the model.
        seed: of everything.
    """

    def __init__(self, documents: Sequence[str], tokenizer: Any, *, seed: int) -> None:
        self._texts, self._tokenizer, self._seed = Texts(documents), tokenizer, seed
        self._size = [len(documents), sum(map(len, documents))]
        self._end = int(tokenizer.eos_token_id)
        self.encode: Callable[[str], list[int]] = lru_cache(maxsize=100_000)(
            lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])
        )
        self._words = np.array(sorted({id for word in (*ADJECTIVES, *NOUNS) for id in self.encode(f" {word}")}))
        self._digits = np.array([id for digit in "0123456789" for id in self.encode(digit)])

    def batch(self, step: int, rows: int, length: int, decaying: bool) -> dict[str, Any]:
        """`ids` and `roles`, both (rows, length + 1); of parted rows also `end`, (1,) where their questions begin."""
        if step % PARTED_EVERY == PARTED_EVERY - 1:
            made = [self.parted(np.random.default_rng((self._seed, step, row)), length) for row in range(rows)]
            parts = {"ids": np.stack([ids for ids, _ in made]), "roles": np.stack([what for _, what in made])}
            return parts | {"end": np.array([length // 2])}
        ids = np.full((rows, length + 1), self._end)
        roles = np.zeros((rows, length + 1), dtype=np.int64)
        for row in range(rows):
            some, what = self.row(np.random.default_rng((self._seed, step, row)), length + 1)
            ids[row, : len(some)], roles[row, : len(some)] = some, what
        return {"ids": ids, "roles": roles}

    def part(self, batch: dict[str, Any], rows: slice) -> dict[str, Any]:
        """Some rows of a batch."""
        return {name: values if name == "end" else values[rows] for name, values in batch.items()}

    def parted(self, rng: np.random.Generator, length: int) -> tuple[Roles, Roles]:
        """A row of `length + 1` tokens: a text in the first half, and its questions with their answers behind that.

        Args:
            rng: of the row.
            length: in tokens.
        """
        half = length // 2
        kind = str(rng.choice(PARTED_KINDS, p=PARTED_SHARES))
        first = rng.random() < PARTED_FIRST
        fact = locker if kind == "multikey" else pair
        cost = len(self.encode(fact("red fox", "1234").text)) + 2
        asking = self._cost(fact("red fox", "1234"), False)
        # Of many questions in front none would stand out.
        questions = int(rng.integers(1, 3)) if first and half > SHORT else 1 if first else half // asking
        room = half - 1 - (questions * (len(self.encode(fact("red fox", "").asked)) + 1) if first else 0)
        most = room // cost
        count, source = _count(kind, most, rng), keys(rng)
        facts = [fact(key, digits(rng, 4)) for key in islice(source, count)]
        wanted = [facts[index] for index in rng.permutation(len(facts))[:questions]]
        front = [self._end, *(self.encode(" ".join(one.asked for one in wanted) + "\n\n") if first else [])]
        if kind == "kv-dense":
            # One more, cut off where the half ends.
            body = self._dense([*facts, fact(next(source), digits(rng, 4))])
        else:
            body = self._scattered(kind, facts, rng, half - len(front))
            body += [(f" {sentence}", KNOWN) for sentence in Supply(NOISE, rng).first(4)]
        answers = {one.answer for one in wanted}
        if first:
            values = {True: WANTED, False: OTHER}
            body = [(text, values[text in answers] if text.isdigit() else role) for text, role in body]
        ids, roles = self._encoded(body)
        ids, roles = [*front, *ids][:half], [*[KNOWN] * len(front), *roles][:half]
        ids, roles = ids + [self._end] * (half - len(ids)), roles + [NOTHING] * (half - len(roles))
        more_ids, more_roles = self._encoded([part for one in wanted for part in _asking(one)])
        ids, roles = ids + more_ids, roles + more_roles
        fill = length + 1 - len(ids)
        return np.array(ids + [self._end] * fill)[: length + 1], np.array(roles + [NOTHING] * fill)[: length + 1]

    def row(self, rng: np.random.Generator, length: int) -> tuple[Roles, Roles]:
        """Ids and roles of one row of at most `length` tokens."""
        kind = str(rng.choice(KINDS, p=SHORT_SHARES if length <= SHORT + 1 else LONG_SHARES))
        if kind == "copy":
            return self._copy(rng, length)
        if kind == "text":
            return self._joined([(" ".join(Supply(self._texts, rng).first(length // 8)), KNOWN)], length)
        if kind == "recall":
            return self._recall(rng, length)
        return self._asked(kind, rng, length)

    def state(self) -> list[int]:
        """Sizes of the texts."""
        return self._size

    def restore(self, state: Sequence[int]) -> None:
        """There is nowhere to go to, if the texts are those of the checkpoint.

        Raises:
            LoadError: they are others.
        """
        check_unchanged("documents and characters", self._size, state)

    def _copy(self, rng: np.random.Generator, length: int) -> tuple[Roles, Roles]:
        """Random digits or words over and over."""
        count = int(rng.integers(4, max(5, length // 2)))
        once = rng.choice(self._digits if rng.random() < 0.7 else self._words, size=count)
        ids = np.concatenate(([self._end], np.resize(once, length - 1)))
        roles = np.full(length, KNOWN)
        roles[count + 2 :] = ANSWER
        return ids, roles

    def _recall(self, rng: np.random.Generator, length: int) -> tuple[Roles, Roles]:
        """Pairs, and all of them once more in another order: as many answers as a row can hold."""
        cost = len(self.encode('\n "red fox": "1234",'))
        count = max(2, (length - 4) // (2 * cost))
        facts = [pair(key, digits(rng, 4)) for key in islice(keys(rng), count)]
        parts = [*self._dense(facts), ("\n\nOnce more:", KNOWN)]
        for index in rng.permutation(count):
            parts += [(f"\n {facts[index].front}", KNOWN), (facts[index].answer, ANSWER), ('",', ANSWER)]
        return self._joined(parts, length)

    def _asked(self, kind: str, rng: np.random.Generator, length: int) -> tuple[Roles, Roles]:
        """A task's text with several questions behind it."""
        first = rng.random() < QUERY_FIRST
        source = keys(rng)
        if kind in ("passkey", "number"):
            value = digits(rng, 5) if kind == "passkey" else repeated(rng, 10)
            facts, most = [needle(kind, value)], 1
        else:
            fact = locker if kind == "multikey" else pair
            cost = len(self.encode(fact("red fox", "1234").text)) + 2
            asking = self._cost(fact("red fox", "1234"), first)
            questions = int(rng.integers(1, 4)) if first else max(1, int(0.4 * length / asking))
            room = (length - 3 - questions * asking) // cost
            while room < 1 and questions > 1:
                questions, room = questions - 1, room + asking // cost
            facts = [fact(key, digits(rng, 4)) for key in islice(source, _count(kind, max(1, room), rng))]
            most = questions
        wanted = [facts[index] for index in rng.permutation(len(facts))[:most]]
        front = [(" ".join(one.asked for one in wanted) + "\n\n", KNOWN)] if first else []
        end = [part for one in wanted for part in _asking(one)]
        if kind == "kv-dense":
            return self._joined([*front, *self._dense(facts), *end], length)
        room = length - 2 - sum(len(self.encode(text)) for text, _ in (*front, *end))
        return self._joined([*front, *self._scattered(kind, facts, rng, room), *end], length)

    def _cost(self, fact: Fact, first: bool) -> int:
        """Tokens of a question, its answer included."""
        asked, end = len(self.encode(fact.asked)), len(self.encode(f"\n\n{fact.asked}\n{fact.cue}"))
        return end + len(fact.answer) + 2 + (asked + 1 if first else 0)

    def _dense(self, facts: Sequence[Fact]) -> list[Part]:
        parts: list[Part] = []
        for number, fact in enumerate(facts):
            front = "\n " if number else "{"
            close = "," if number < len(facts) - 1 else "}"
            parts.append((front + fact.front, KNOWN))
            parts += [(fact.answer, KNOWN), (fact.back + close, KNOWN)]
        return parts

    def _scattered(self, kind: str, facts: Sequence[Fact], rng: np.random.Generator, room: int) -> list[Part]:
        """Facts in as much filler as there is room for."""
        pieces = [self._fact(kind, fact) for fact in facts]
        room -= sum(len(self.encode(text)) for piece in pieces for text, _ in piece)
        filler: list[Part] = []
        for sentence in (NOISE if rng.random() < 0.5 else self._texts).sentences(rng):
            room -= len(self.encode(f" {sentence}"))
            if room < 0:
                break
            filler.append((f" {sentence}", KNOWN))
        places = np.sort(rng.integers(0, len(filler) + 1, size=len(pieces)))
        parts: list[Part] = []
        for number in range(len(filler) + 1):
            for index in np.flatnonzero(places == number):
                parts += pieces[index]
            parts += filler[number : number + 1]
        # The context begins without a space.
        return [(parts[0][0][1:], parts[0][1]), *parts[1:]]

    def _fact(self, kind: str, fact: Fact) -> list[Part]:
        """A fact between sentences; where its value stands twice, the second time is an answer of half the weight."""
        if kind == "kv":
            return [(" {" + fact.front, KNOWN), (fact.answer, KNOWN), (fact.back + "}", KNOWN)]
        front, *rest = fact.text.split(fact.answer)
        parts = [(f" {front}", KNOWN), (fact.answer, KNOWN)]
        for number, text in enumerate(rest):
            parts += [(text, KNOWN)] + ([(fact.answer, ANSWER)] if number < len(rest) - 1 else [])
        return parts

    def _joined(self, parts: Sequence[Part], length: int) -> tuple[Roles, Roles]:
        ids, roles = self._encoded(parts)
        return np.array([self._end, *ids][:length]), np.array([KNOWN, *roles][:length])

    def _encoded(self, parts: Sequence[Part]) -> tuple[list[int], list[int]]:
        """Tokens of all parts, and what each is."""
        encoded = [(self.encode(text), role) for text, role in parts]
        return [id for ids, _ in encoded for id in ids], [role for ids, role in encoded for _ in ids]


def _count(kind: str, most: int, rng: np.random.Generator) -> int:
    """Facts of a row: as many as there is room for, or some."""
    return max(1, most if kind == "kv-dense" else int(np.exp(rng.uniform(0, np.log(0.7 * most + 1)))))


def _asking(fact: Fact) -> list[Part]:
    """A question, the answer behind its cue, and what closes it."""
    quoted = fact.cue.endswith('"')
    return [
        (f"\n\n{fact.asked}\n{fact.cue}", KNOWN),
        (fact.answer if quoted else f" {fact.answer}", ANSWER),
        ('"' if quoted else ".", ANSWER),
    ]
