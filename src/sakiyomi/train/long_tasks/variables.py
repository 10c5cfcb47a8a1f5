"""Variable tracking: a value goes from name to name, and all names that hold it are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.train.long_tasks.example import Example, Fact, Task
from sakiyomi.train.long_tasks.facts import question
from sakiyomi.train.long_tasks.filler import NOISE, Filler, Supply
from sakiyomi.train.long_tasks.haystack import scattered

__all__ = ["Variables"]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Variables(Task):
    """Chains of assignments in filler; of one chain every name is asked for.

    Attributes:
        hops: copies from name to name behind the first assignment; a chain has one name more.
        chains: of which one is asked for, the others are distractors.
        filler: what they are scattered in.
    """

    name = "variables"
    hops: int = 4
    chains: int = 1
    filler: Filler = NOISE

    def __post_init__(self) -> None:
        for field in ("hops", "chains"):
            if getattr(self, field) < 1:
                raise InputError(f"{field} is {getattr(self, field)}, expected 1 or more")
        if self.chains * (self.hops + 1) > 1000:
            raise InputError(f"{self.chains} chains of {self.hops} hops have over 1000 names; give fewer")

    @property
    def answer_tokens(self) -> int:
        """See ``Task``."""
        return 5 * (self.hops + 1) + 4

    def builder(self, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
        """See ``Task``; the depth is that of the first assignment, the copies stand behind it."""
        names = [
            "".join(LETTERS[int(index) // 26**place % 26] for place in range(3))
            for index in rng.choice(26**3, size=self.chains * (self.hops + 1), replace=False)
        ]
        # Chosen without replacement: one value is that of one chain.
        values = [f"{value:05d}" for value in rng.choice(100_000, size=self.chains, replace=False)]
        links: list[tuple[float, Fact]] = []
        for chain, value in enumerate(values):
            own = names[chain * (self.hops + 1) : (chain + 1) * (self.hops + 1)]
            places = np.sort(rng.random(self.hops + 1))
            if depth is not None and chain == 0:
                places = np.concatenate(([depth], depth + (1 - depth) * places[1:]))
            for place, (new, old) in zip(places, zip(own, [value, *own], strict=False), strict=True):
                links.append((float(place), Fact("SET ", new, f" = {old};")))
        wanted, supply = names[: self.hops + 1], Supply(self.filler, rng)
        asked = f"Question: Which variables hold the value {values[0]}?"

        def build(count: int) -> Example:
            context, spans = scattered(supply.first(count), links)
            end = question(asked, f"Answer: The value {values[0]} is in")
            return Example(self.name, context, end, tuple(wanted), spans[: self.hops + 1], asked)

        return build
