"""Tasks that hide facts: between sentences of filler one value, pairs of keys and values, or numbers with owners; and a
text of nothing but pairs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.train.long_tasks.example import Example, Fact, Task
from sakiyomi.train.long_tasks.facts import NEEDLES, digits, keys, locker, needle, pair, question, repeated
from sakiyomi.train.long_tasks.filler import NOISE, Filler, Supply

__all__ = ["DensePairs", "MultiKey", "Needle", "Pairs", "scattered"]

JOINT = ",\n "  # between the pairs of a JSON object


@dataclass(frozen=True)
class Needle(Task):
    """One value in a long text: a pass key of 5 digits, or a long number of 10, half of them doubled.

    Attributes:
        name: "passkey" or "number".
        filler: what it is hidden in.
    """

    name: str = "passkey"
    filler: Filler = NOISE

    def __post_init__(self) -> None:
        if self.name not in NEEDLES:
            raise InputError(f"no needle is called {self.name!r}; expected {' or '.join(NEEDLES)}")

    @property
    def answer_tokens(self) -> int:
        """See ``Task``."""
        return 8 if self.name == "passkey" else 14

    def fact(self, rng: np.random.Generator) -> Fact:
        """A new value."""
        return needle(self.name, digits(rng, 5) if self.name == "passkey" else repeated(rng, 10))

    def builder(self, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
        """See ``Task``."""
        place = rng.random() if depth is None else depth
        fact, supply = self.fact(rng), Supply(self.filler, rng)

        def build(count: int) -> Example:
            context, (span,) = scattered(supply.first(count), [(place, fact)])
            end = question(fact.asked, fact.cue)
            return Example(self.name, context, end, (fact.answer,), (span,), fact.asked)

        return build


@dataclass(frozen=True)
class _Several(Task):
    """Facts with different keys, of which some are asked for.

    Attributes:
        facts: in the text.
        queries: of them that are asked for, in one question.
        value_digits: of a value.
        filler: what they are scattered in.
    """

    facts: int = 8
    queries: int = 1
    value_digits: int = 4
    filler: Filler = NOISE

    def __post_init__(self) -> None:
        if not 1 <= self.queries <= self.facts:
            raise InputError(f"queries is {self.queries}, expected 1 to {self.facts}, the number of facts")
        if self.value_digits < 1:
            raise InputError(f"value_digits is {self.value_digits}, expected 1 or more")

    @property
    def answer_tokens(self) -> int:
        """See ``Task``."""
        return (self.value_digits + 3) * self.queries + (32 * (self.queries - 1))

    @staticmethod
    @abstractmethod
    def fact(key: str, value: str) -> Fact:
        """A pair as it stands in the text."""

    def builder(self, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
        """See ``Task``."""
        facts = [self.fact(key, digits(rng, self.value_digits)) for key in islice(keys(rng), self.facts)]
        places = rng.random(self.facts)
        if depth is not None:
            # What is asked for stands there; the others are distractors around it.
            places[: self.queries] = depth
        wanted, supply = facts[: self.queries], Supply(self.filler, rng)
        asked = " ".join(one.asked for one in wanted)
        others = tuple((question(one.asked, one.cue), one.answer) for one in facts[self.queries :])

        def build(count: int) -> Example:
            context, spans = scattered(supply.first(count), list(zip(places, facts, strict=True)))
            end = question(asked, wanted[0].cue)
            answers = tuple(one.answer for one in wanted)
            return Example(self.name, context, end, answers, spans[: self.queries], asked, others)

        return build


def braced(key: str, value: str) -> Fact:
    """A pair that stands alone."""
    plain = pair(key, value)
    return replace(plain, front="{" + plain.front, back=plain.back + "}")


@dataclass(frozen=True)
class Pairs(_Several):
    """Pairs of a key and a value as JSON has them, scattered in filler; one is asked for."""

    name = "kv"
    fact = staticmethod(braced)


@dataclass(frozen=True)
class MultiKey(_Several):
    """Numbers with owners, in sentences; the number of one owner is asked for, or of several (``queries``)."""

    name = "multikey"
    fact = staticmethod(locker)


def _span(fact: Fact, at: int) -> tuple[int, int]:
    """Where a fact's answer begins and ends in a text in which the fact begins there."""
    begin = at + len(fact.front)
    return begin, begin + len(fact.answer)


def scattered(sentences: Sequence[str], facts: Sequence[tuple[float, Fact]]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Sentences with facts between them.

    Args:
        sentences: the filler.
        facts: each with its place, 0 in front of all sentences, 1 behind them.

    Returns:
        The text, and the span of each fact's answer in it, in the order given.
    """
    before = [round(place * len(sentences)) for place, _ in facts]
    order = sorted(range(len(facts)), key=lambda index: facts[index][0])
    parts: list[str] = []
    spans: dict[int, tuple[int, int]] = {}
    at, done = 0, 0
    for number in range(len(sentences) + 1):
        while done < len(order) and before[order[done]] == number:
            fact = facts[order[done]][1]
            spans[order[done]] = _span(fact, at)
            parts.append(fact.text)
            at, done = at + len(fact.text) + 1, done + 1
        if number < len(sentences):
            parts.append(sentences[number])
            at += len(sentences[number]) + 1
    return " ".join(parts), tuple(spans[index] for index in range(len(facts)))


@dataclass(frozen=True)
class DensePairs(Task):
    """A JSON object of as many pairs as fit; the value of one key is asked for.

    No memory that is smaller than the text can hold the answer unless it knows the question.

    Attributes:
        value_digits: of a value.
    """

    name = "kv-dense"
    least: ClassVar[int] = 1
    value_digits: int = 4

    def __post_init__(self) -> None:
        if self.value_digits < 1:
            raise InputError(f"value_digits is {self.value_digits}, expected 1 or more")

    @property
    def answer_tokens(self) -> int:
        """See ``Task``."""
        return self.value_digits + 3

    def builder(self, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
        """See ``Task``."""
        place = rng.random() if depth is None else depth
        source, drawn = keys(rng), list[Fact]()

        def build(count: int) -> Example:
            while len(drawn) < count:
                drawn.append(pair(next(source), digits(rng, self.value_digits)))
            facts = drawn[:count]
            wanted = round(place * (count - 1))
            context, spans = listed(facts)
            fact = facts[wanted]
            end = question(fact.asked, fact.cue)
            return Example(self.name, context, end, (fact.answer,), (spans[wanted],), fact.asked)

        return build


def listed(facts: Sequence[Fact]) -> tuple[str, list[tuple[int, int]]]:
    """Pairs as a JSON object, and the spans of their values in it."""
    spans, at = [], 1
    for fact in facts:
        spans.append(_span(fact, at))
        at += len(fact.text) + len(JOINT)
    return "{" + JOINT.join(fact.text for fact in facts) + "}", spans
