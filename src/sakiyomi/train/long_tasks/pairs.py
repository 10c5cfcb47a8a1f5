"""Dense retrieval: nothing but pairs of keys and values, any of which may be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.train.long_tasks.example import Example, Fact, check_depth, fitted, hits
from sakiyomi.train.long_tasks.facts import pair, question
from sakiyomi.train.long_tasks.keys import digits, keys

__all__ = ["DensePairs", "listed"]


@dataclass(frozen=True)
class DensePairs:
    """A JSON object of as many pairs as fit; the value of one key is asked for.

    No memory that is smaller than the text can hold the answer unless it knows the question.

    Attributes:
        value_digits: of a value.
    """

    value_digits: int = 4

    def __post_init__(self) -> None:
        if self.value_digits < 1:
            raise InputError(f"value_digits is {self.value_digits}, expected 1 or more")

    @property
    def name(self) -> str:
        """See ``Task``."""
        return "kv-dense"

    @property
    def answer_tokens(self) -> int:
        """See ``Task``."""
        return self.value_digits + 3

    def make(self, rng: np.random.Generator, length: int, tokenizer: Any, depth: float | None = None) -> Example:
        """See ``Task``."""
        check_depth(depth)
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

        return fitted(build, 1, length, tokenizer)

    def score(self, text: str, example: Example) -> float:
        """See ``Task``."""
        return hits(text, example.answers)


def listed(facts: Sequence[Fact]) -> tuple[str, list[tuple[int, int]]]:
    """Pairs as a JSON object, and the spans of their values in it."""
    spans, at = [], 1
    for fact in facts:
        spans.append((at + fact.span[0], at + fact.span[1]))
        at += len(fact.text) + len(JOINT)
    return "{" + JOINT.join(fact.text for fact in facts) + "}", spans


JOINT = ",\n "
