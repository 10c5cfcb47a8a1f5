"""The facts that tasks hide, and the texts that hide them: a value or pairs between sentences, a text of nothing but
pairs, chains of variables, and a list of words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.train.long_tasks.example import NOISE, Example, Fact, Supply, Task

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


# ---------------------------------------------------------------- texts: a function for each kind


FACTS = 8
"""Pairs or numbers in a text, of which one is asked for."""
DIGITS = 4
"""Of a value."""
HOPS = 4
"""Copies of a variable from name to name after the first assignment."""
COMMON, OFTEN, SELDOM = 5, 12, 2
"""Words that are asked for, and how many times one of them and any other word stands in the list."""
JOINT = ",\n "  # between the pairs of a JSON object
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def one_value(task: Task, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
    """One value in a long text: a pass key of 5 digits, or a long number of 10, half of them doubled."""
    place = rng.random() if depth is None else depth
    fact = needle(task.name, digits(rng, 5) if task.name == "passkey" else repeated(rng, 10))
    supply = Supply(task.filler or NOISE, rng)

    def build(count: int) -> Example:
        context, spans = scattered(supply.first(count), [(place, fact)])
        return Example(task.name, context, question(fact), (fact.answer,), spans, fact.asked)

    return build


def several(fact: Callable[[str, str], Fact]) -> Callable[..., Callable[[int], Example]]:
    """Facts with different keys, scattered in filler, of which one is asked for; `fact` makes one of key and value."""

    def builder(task: Task, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
        facts = [fact(key, digits(rng, DIGITS)) for key in islice(keys(rng), FACTS)]
        places = rng.random(FACTS)
        if depth is not None:
            places[0] = depth  # of what is asked for; the others are distractors around it
        wanted, supply = facts[0], Supply(task.filler or NOISE, rng)
        others = tuple((question(one), one.answer) for one in facts[1:])

        def build(count: int) -> Example:
            context, spans = scattered(supply.first(count), list(zip(places, facts, strict=True)))
            return Example(task.name, context, question(wanted), (wanted.answer,), spans[:1], wanted.asked, others)

        return build

    return builder


def braced(key: str, value: str) -> Fact:
    """A pair as JSON has it, that stands alone."""
    plain = pair(key, value)
    return replace(plain, front="{" + plain.front, back=plain.back + "}")


def scattered(sentences: Sequence[str], facts: Sequence[tuple[float, Fact]]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Sentences with facts between them.

    Args:
        sentences: the filler.
        facts: each with its place, 0 in front of all sentences, 1 after them.

    Returns:
        The text, and the span of each fact's answer in it, in the order given.
    """
    order = sorted(range(len(facts)), key=lambda index: facts[index][0])
    parts: list[str] = []
    spans: dict[int, tuple[int, int]] = {}
    at = done = 0
    for number in range(len(sentences) + 1):
        while done < len(order) and round(facts[order[done]][0] * len(sentences)) == number:
            fact = facts[order[done]][1]
            spans[order[done]] = _span(fact, at)
            parts.append(fact.text)
            at, done = at + len(fact.text) + 1, done + 1
        if number < len(sentences):
            parts.append(sentences[number])
            at += len(sentences[number]) + 1
    return " ".join(parts), tuple(spans[index] for index in range(len(facts)))


def _span(fact: Fact, at: int) -> tuple[int, int]:
    """Where a fact's answer begins and ends in a text in which the fact begins there."""
    begin = at + len(fact.front)
    return begin, begin + len(fact.answer)


def dense_pairs(task: Task, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
    """A JSON object of as many pairs as fit; the value of one key is asked for.

    No memory that is smaller than the text can hold the answer unless it knows the question.
    """
    place = rng.random() if depth is None else depth
    source, facts = keys(rng), list[Fact]()

    def build(count: int) -> Example:
        facts.extend(pair(next(source), digits(rng, DIGITS)) for _ in range(count - len(facts)))
        wanted = round(place * (count - 1))
        texts = [fact.text for fact in facts[:count]]
        at = 1 + sum(len(text) + len(JOINT) for text in texts[:wanted])
        fact, context = facts[wanted], "{" + JOINT.join(texts) + "}"
        return Example(task.name, context, question(fact), (fact.answer,), (_span(fact, at),), fact.asked)

    return build


def variables(task: Task, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
    """A chain of assignments in filler, of which every name is asked for; `depth` is that of the first assignment."""
    names = [
        "".join(LETTERS[int(index) // 26**place % 26] for place in range(3))
        for index in rng.choice(26**3, size=HOPS + 1, replace=False)
    ]
    value = f"{rng.choice(100_000, size=1, replace=False)[0]:05d}"
    places = np.sort(rng.random(HOPS + 1))
    if depth is not None:
        places = np.concatenate(([depth], depth + (1 - depth) * places[1:]))
    pairs = zip(places, names, [value, *names], strict=False)
    links = [(float(place), Fact("SET ", new, f" = {old};")) for place, new, old in pairs]
    supply = Supply(task.filler or NOISE, rng)
    asked = Fact("", "", "", f"Question: Which variables hold the value {value}?", f"Answer: The value {value} is in")

    def build(count: int) -> Example:
        context, spans = scattered(supply.first(count), links)
        return Example(task.name, context, question(asked), tuple(names), spans, asked.asked)

    return build


def common_words(task: Task, rng: np.random.Generator, depth: float | None) -> Callable[[int], Example]:
    """A list of words in random order, in which those that stand there often are asked for.

    Longer texts have more of the other words. What counts stands everywhere in the text: a depth is refused.
    """
    if depth is not None:
        raise InputError(f"depth is {depth:g}, and what task 'words' asks for stands everywhere; give depth=None")
    source = (key.replace(" ", "-") for key in keys(rng))
    wanted, others = list(islice(source, COMMON)), list[str]()
    # One key for each copy: in the order of their keys a longer list holds a shorter one.
    order_of = dict[tuple[str, int], float]()
    asked = Fact("", "", "", f"Question: Which {COMMON} words stand most often in the list?", "Answer:")

    def build(count: int) -> Example:
        others.extend(islice(source, max(0, count - len(others))))
        copies = [(word, copy) for word in wanted for copy in range(OFTEN)]
        copies += [(word, copy) for word in others[:count] for copy in range(SELDOM)]
        for one in copies:
            if one not in order_of:
                order_of[one] = rng.random()
        listed = [word for word, _ in sorted(copies, key=order_of.__getitem__)]
        context = " ".join(listed)
        places = [match.span() for match in re.finditer(r"\S+", context)]
        spans = tuple(place for place, word in zip(places, listed, strict=True) if word in wanted)
        return Example(task.name, context, question(asked), tuple(wanted), spans, asked.asked)

    return build
