"""Common words: a list in which a few words come often, and those are asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.train.long_tasks.example import Example, Task
from sakiyomi.train.long_tasks.facts import keys, question

__all__ = ["CommonWords"]


@dataclass(frozen=True)
class CommonWords(Task):
    """A list of words in random order: some stand there often, the others seldom.

    What counts stands everywhere in the text: a depth is refused.

    Attributes:
        common: words that are asked for.
        often, seldom: how many times a common word and another one stand there.
    """

    name = "words"
    common: int = 5
    often: int = 12
    seldom: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.common <= 100:
            raise InputError(f"common is {self.common}, expected 1 to 100")
        if not 1 <= self.seldom < self.often:
            raise InputError(f"often is {self.often} and seldom {self.seldom}, expected 1 <= seldom < often")

    @property
    def answer_tokens(self) -> int:
        """See ``Task``."""
        return 20 * self.common

    def builder(self, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
        """See ``Task``; longer texts have more of the words that are not asked for."""
        if depth is not None:
            raise InputError(f"depth is {depth:g}, and what task 'words' asks for stands everywhere; give depth=None")
        source = (key.replace(" ", "-") for key in keys(rng))
        wanted, others = list(islice(source, self.common)), list[str]()
        # One key for each copy: in the order of their keys a longer list holds a shorter one.
        order_of = dict[tuple[str, int], float]()
        asked = f"Question: Which {self.common} words stand most often in the list?"

        def build(count: int) -> Example:
            others.extend(islice(source, max(0, count - len(others))))
            copies = [(word, copy) for word in wanted for copy in range(self.often)]
            copies += [(word, copy) for word in others[:count] for copy in range(self.seldom)]
            for one in copies:
                if one not in order_of:
                    order_of[one] = rng.random()
            listed = [word for word, _ in sorted(copies, key=order_of.__getitem__)]
            context = " ".join(listed)
            places = [match.span() for match in re.finditer(r"\S+", context)]
            spans = tuple(place for place, word in zip(places, listed, strict=True) if word in wanted)
            return Example(self.name, context, question(asked, "Answer:"), tuple(wanted), spans, asked)

        return build
