"""Rows for the retrieval model: facts in filler, and behind it many questions with their answers.

A row depends on the seed, the step and its own number alone: nothing is kept, a resumed run sees the same rows. Rows
are put together from encoded parts, whose borders are borders of tokens in the whole text, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import LoadError
from sakiyomi.longtasks.example import Fact
from sakiyomi.longtasks.facts import locker, needle, pair
from sakiyomi.longtasks.filler import NOISE, Supply, Texts
from sakiyomi.longtasks.keys import ADJECTIVES, NOUNS, digits, keys, repeated

__all__ = ["ANSWER", "FRONT", "KNOWN", "RetrievalRows"]

KINDS = ("passkey", "number", "kv", "kv-dense", "multikey", "recall", "copy", "text")
SHORT_SHARES = (0.08, 0.10, 0.14, 0.08, 0.14, 0.36, 0.08, 0.02)
LONG_SHARES = (0.08, 0.12, 0.18, 0.24, 0.18, 0.16, 0.02, 0.02)
SHORT = 128
"""Up to this length rows hold little, and are mostly such as give many answers."""

NOTHING, KNOWN, ANSWER = 0, 1, 2
"""What a token is: padding, text, (part of) an answer."""

QUERY_FIRST = 0.3
"""Share of the rows with their questions in front, too."""

PARTED_EVERY = 4
"""One step of so many, in rows that are not short, has parted rows, of a fourth of the length (see `parted`)."""

FRONT, END_SHORT, END_LONG = 24, 16, 40
"""Tokens of a parted row's question in front, and of its end, without or with the question once more."""

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
        """`ids` and `roles`, both (rows, length + 1); of parted rows also `end`, (1,) where their last part begins."""
        if length > SHORT and step % PARTED_EVERY == PARTED_EVERY - 1:
            return self._parted_batch(step, rows * 4, length // 4)
        ids = np.full((rows, length + 1), self._end)
        roles = np.zeros((rows, length + 1), dtype=np.int64)
        for row in range(rows):
            some, what = self.row(np.random.default_rng((self._seed, step, row)), length + 1)
            ids[row, : len(some)], roles[row, : len(some)] = some, what
        return {"ids": ids, "roles": roles}

    def _parted_batch(self, step: int, rows: int, length: int) -> dict[str, Any]:
        again = step // PARTED_EVERY % 2 == 1
        made = [self.parted(np.random.default_rng((self._seed, step, row)), length + 1, again) for row in range(rows)]
        end = length + 1 - (END_LONG if again else END_SHORT)
        return {"ids": np.stack([ids for ids, _ in made]), "roles": np.stack([what for _, what in made])} | {
            "end": np.array([end])
        }

    def parted(self, rng: np.random.Generator, length: int, again: bool) -> tuple[Roles, Roles]:
        """A row in three parts of fixed lengths: a question, the text, and the answer.

        A pass over parted rows lets the answer see the text in the last layer alone, and the question in front never
        (see `retriever.parted_pass`): the text must have found by itself, while it was read, where it answers the
        question in front. Without such rows nothing in a token's state tells a method that decides while it reads.

        Args:
            rng: of the row.
            length: in tokens.
            again: the question stands in front of the answer once more.
        """
        dense = rng.random() < 0.5
        fact = pair if dense or rng.random() < 0.5 else locker
        source = keys(rng)
        room = length - FRONT - (END_LONG if again else END_SHORT)
        cost = len(self.encode(fact("red fox", "1234").text)) + 2
        most = room // cost
        count = most if dense else int(np.exp(rng.uniform(0, np.log(0.7 * most + 1))))
        facts = [fact(key, digits(rng, 4)) for key in islice(source, max(1, count))]
        wanted = facts[int(rng.integers(len(facts)))]
        if dense:
            # One more, cut off where the room ends.
            body = self._dense([*facts, fact(next(source), digits(rng, 4))])
        else:
            body = self._scattered("multikey" if fact is locker else "kv", facts, rng, room)
            body += [(f" {sentence}", KNOWN) for sentence in Supply(NOISE, rng).first(4)]
        front = [self._end, *self.encode(f"{wanted.asked}\n\n")]
        middle = [id for text, _ in body for id in self.encode(text)][:room]
        asked = f"{wanted.asked}\n{wanted.cue}" if again else 'Answer: "' if wanted.cue.endswith('"') else "Answer:"
        before = self.encode(f"\n\n{asked}")
        answer = [id for text, _ in _answer(wanted) for id in self.encode(text)]
        ids = [*[self._end] * (FRONT - len(front)), *front][-FRONT:] + middle
        roles = [NOTHING] * max(0, FRONT - len(front)) + [KNOWN] * min(FRONT, len(front)) + [KNOWN] * len(middle)
        fill = FRONT + room - len(ids)
        ids, roles = ids + [self._end] * fill, roles + [NOTHING] * fill
        ids, roles = ids + before + answer, roles + [KNOWN] * len(before) + [ANSWER] * len(answer)
        fill = length - len(ids)
        return np.array(ids + [self._end] * fill)[:length], np.array(roles + [NOTHING] * fill)[:length]

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
        if list(state) != self._size:
            raise LoadError(
                f"the training files have {self._size} documents and characters, those of the checkpoint had "
                f"{list(state)}: their text has changed; give the files as they were, or begin another run with "
                "another --out"
            )

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
            front = facts[index].text[: facts[index].span[0]]
            parts += [(f"\n {front}", KNOWN), (facts[index].answer, ANSWER), ('",', ANSWER)]
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
            room = max(1, room)
            count = room if kind == "kv-dense" else int(np.exp(rng.uniform(0, np.log(0.7 * room + 1))))
            facts = [fact(key, digits(rng, 4)) for key in islice(source, max(1, count))]
            most = questions
        wanted = [facts[index] for index in rng.permutation(len(facts))[:most]]
        front = [(" ".join(one.asked for one in wanted) + "\n\n", KNOWN)] if first else []
        end: list[Part] = []
        for one in wanted:
            end += [(f"\n\n{one.asked}\n{one.cue}", KNOWN), *_answer(one)]
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
            parts.append((front + fact.text[: fact.span[0]], KNOWN))
            parts += [(fact.answer, KNOWN), (fact.text[fact.span[1] :] + close, KNOWN)]
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
            begin, end = fact.span
            return [(" {" + fact.text[:begin], KNOWN), (fact.answer, KNOWN), (fact.text[end:] + "}", KNOWN)]
        front, *rest = fact.text.split(fact.answer)
        parts = [(f" {front}", KNOWN), (fact.answer, KNOWN)]
        for number, text in enumerate(rest):
            parts += [(text, KNOWN)] + ([(fact.answer, ANSWER)] if number < len(rest) - 1 else [])
        return parts

    def _joined(self, parts: Sequence[Part], length: int) -> tuple[Roles, Roles]:
        ids, roles = [self._end], [KNOWN]
        for text, role in parts:
            some = self.encode(text)
            ids += some
            roles += [role] * len(some)
        return np.array(ids[:length]), np.array(roles[:length])


def _answer(fact: Fact) -> list[Part]:
    """The answer behind its cue, and what closes it."""
    quoted = fact.cue.endswith('"')
    return [(fact.answer if quoted else f" {fact.answer}", ANSWER), ('"' if quoted else ".", ANSWER)]
