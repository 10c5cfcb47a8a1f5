"""The facts that tasks hide, with the words around them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sakiyomi.train.long_tasks.example import Fact

NEEDLES = {"passkey": "pass key", "number": "long number"}
"""What is hidden, by task."""


def needle(task: str, value: str) -> Fact:
    """The one value of a text; it stands there twice."""
    what = NEEDLES[task]
    return Fact(
        f"For the record, the {what} is ",
        value,
        f"; that is {value} and nothing else.",
        asked=f"Question: Which {what} does the text name?",
        cue=f"Answer: The {what} is",
    )


def pair(key: str, value: str) -> Fact:
    """A pair as JSON has it, without braces."""
    asked = f'Question: Which value belongs to the key "{key}"?'
    return Fact(f'"{key}": "', value, '"', asked, cue=f'Answer: "{key}": "')


def locker(key: str, value: str) -> Fact:
    """One of several numbers, each with its owner."""
    opens = f"The locker of the {key} opens with"
    return Fact(f"{opens} ", value, ".", f"Question: What opens the locker of the {key}?", cue=f"Answer: {opens}")


def question(fact: Fact) -> str:
    """What follows the context."""
    return f"\n\n{fact.asked}\n{fact.cue}"


# ---------------------------------------------------------------- keys


ADJECTIVES = tuple(
    """
amber ancient black blue bold brave bright broken brown busy calm clean clever cold cosy crimson curly dark deep dry
dusty early fast flat fresh gentle giant glad golden grand grey happy heavy hidden hollow honest hot icy jolly kind
large late lazy light little lonely long loud lucky merry narrow new noisy old orange pale pink plain polite proud
purple quick quiet red
""".split()  # noqa: SIM905
)
NOUNS = tuple(
    """
acorn anchor apple badger barrel basket beaver bell boat bottle bridge bucket button candle castle cat chair clock
cloud coin crow cup deer dog door dragon drum duck eagle feather fence fiddle flute forest fox garden goose hammer
harbour hat hedgehog horse island kettle key kite ladder lamp lantern lemon lion mill mirror mountain mouse needle
otter owl paddle pear pebble pencil pony rabbit
""".split()  # noqa: SIM905
)

_PAIRS = tuple(f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS)


def keys(rng: np.random.Generator) -> Iterator[str]:
    """Different keys in random order: all pairs of an adjective and a noun (4,096), then those with two adjectives."""
    for index in rng.permutation(len(_PAIRS)):
        yield _PAIRS[index]
    for first in rng.permutation(ADJECTIVES):
        for index in rng.permutation(len(_PAIRS)):
            if not _PAIRS[index].startswith(f"{first} "):
                yield f"{first} {_PAIRS[index]}"


def digits(rng: np.random.Generator, count: int) -> str:
    """A random number of so many digits, zeros in front allowed."""
    return "".join(map(str, rng.integers(0, 10, size=count)))


def repeated(rng: np.random.Generator, count: int) -> str:
    """So many digits, half of them doubled: a copy must count, not only follow what it wrote last."""
    found = list(digits(rng, count - count // 2))
    for _ in range(count // 2):
        at = int(rng.integers(len(found)))
        found.insert(at, found[at])
    return "".join(found)
