"""What a task gives: a text, a question about it, its answers, and where in the text they stand; and filler, text that
has nothing to do with the question: sentences of our own, or those of the user's files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.train.data import read_documents

LONGEST = 240
"""Characters after which a sentence is cut: the length of an example is a whole number of them."""

SENTENCES = (
    "The rain fell on the roof all night.",
    "Somebody had left the window open.",
    "A cart rolled slowly down the lane.",
    "The bread was still warm.",
    "Nobody spoke for a while.",
    "The wind turned to the north.",
    "There was dust on every shelf.",
    "The children ran along the river.",
    "A dog barked far away.",
    "The soup began to boil.",
    "They sat by the fire and waited.",
    "It was a day like any other.",
    "The road went up the hill and down again.",
    "The leaves had started to fall.",
    "She folded the letter and put it away.",
    "He looked at the sky for a long time.",
    "The market closed early that week.",
    "Two sails showed on the water.",
    "The lamp burned low.",
    "In the morning there was frost on the grass.",
)


class Filler(Protocol):
    """A source of sentences."""

    def sentences(self, rng: np.random.Generator) -> Iterator[str]:
        """Sentences without end, drawn with the generator."""


@dataclass(frozen=True)
class Noise:
    """A few short sentences in random order, over and over."""

    lines: tuple[str, ...] = SENTENCES

    def sentences(self, rng: np.random.Generator) -> Iterator[str]:
        """See ``Filler``."""
        while True:
            for index in rng.integers(len(self.lines), size=64):
                yield self.lines[index]


NOISE = Noise()


class Texts:
    """Documents of the user, a random one after the other, each from a random sentence on: with their beginnings, texts
    of a few long books would all begin alike.

    Args:
        documents: their texts.

    Raises:
        InputError: there is none with a sentence in it.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        self._documents = [parts for text in documents if (parts := split(text))]
        if not self._documents:
            raise InputError("the filler has no sentence; give documents of text")

    def sentences(self, rng: np.random.Generator) -> Iterator[str]:
        """See ``Filler``."""
        while True:
            document = self._documents[int(rng.integers(len(self._documents)))]
            yield from document[int(rng.integers(len(document))) :]


class Supply:
    """The sentences of one example: the first n are the same however many are asked for."""

    def __init__(self, filler: Filler, rng: np.random.Generator) -> None:
        self._source, self._drawn = filler.sentences(rng), list[str]()

    def first(self, count: int) -> list[str]:
        """The first sentences."""
        self._drawn += islice(self._source, max(0, count - len(self._drawn)))
        return self._drawn[:count]


def split(text: str) -> list[str]:
    """Sentences of a text, those that are very long cut between words."""
    pieces = re.split(r'(?<=[.!?。！？])\s+|(?<=[.!?][”"’])\s+|(?<=[。！？])', " ".join(text.split()))
    return [part for piece in pieces if piece for part in _cut(piece)]


def _cut(sentence: str) -> Iterator[str]:
    while len(sentence) > LONGEST:
        at = sentence.rfind(" ", 1, LONGEST)
        at = at if at > 0 else LONGEST
        yield sentence[:at]
        sentence = sentence[at:].lstrip()
    if sentence:
        yield sentence


def read_filler(paths: Sequence[Path]) -> Texts:
    """Filler from files of texts or chats, see `data.read_records`.

    Raises:
        LoadError, InputError: a file cannot be read, or holds no text.
    """
    return Texts([text for path in paths for text in read_documents(path) if isinstance(text, str)])


TRIES = 12
"""Texts that are encoded at most while the length is sought; the gap shrinks to a piece or two in about five."""


@dataclass(frozen=True)
class Example:
    """A question about a long text.

    Attributes:
        task: name of its task.
        context: the long text.
        question: what follows the text, ending where the answer begins.
        answers: what the answer must hold, all of them.
        spans: (begin, end) in characters of the context: what the answers need.
        asked: the question without the beginning of an answer.
        others: further questions that the text answers, each as ``question`` has it and with its answer.
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    asked: str
    others: tuple[tuple[str, str], ...] = ()

    def prompt(self, query_first: bool = False) -> str:
        """Text for the model.

        Args:
            query_first: the question also stands in front of the text, for methods that decide while they read.
        """
        return (f"{self.asked}\n\n" if query_first else "") + self.context + self.question


@dataclass(frozen=True)
class Task:
    """A kind of question.

    Attributes:
        name: as in ``TASKS``.
        builder: of task, rng and depth (arguments of ``make``) makes what makes an example with so many units of text.
        answer_tokens: new tokens that an answer may take, enough where every character is a token.
        filler: what the facts are hidden in; None: the text has none.
        least: fewest units (filler sentences, pairs, words) of a text.
    """

    name: str
    builder: Callable[[Task, np.random.Generator, float | None], Callable[[int], Example]]
    answer_tokens: int
    filler: Filler | None = None
    least: int = 0

    def make(self, rng: np.random.Generator, length: int, tokenizer: Any, depth: float | None = None) -> Example:
        """An example, which depends on the arguments alone.

        Args:
            rng: source of all that is random.
            length: most tokens of ``prompt(query_first=True)``, special tokens included; the plain prompt is shorter
                by its question.
            tokenizer: of the model, as transformers has it.
            depth: where in the text what is asked for stands, 0 the beginning, 1 the end; None: anywhere.

        Raises:
            InputError: the length leaves no room for the task, or the depth is outside 0..1.
        """
        if depth is not None and not 0 <= depth <= 1:
            raise InputError(f"depth is {depth!r}, expected a number from 0 (the beginning) to 1 (the end), or None")
        return fitted(self.builder(self, rng, depth), self.least, length, tokenizer)

    def score(self, text: str, example: Example) -> float:
        """How right an answer is, 0..1."""
        return hits(text, example.answers)


@dataclass(frozen=True)
class Fact:
    """Something to be found, and the question for it.

    Attributes:
        front, back: what stands before and after the answer in the context.
        answer: without its beginning, and without a space in front.
        asked: the question.
        cue: the beginning of the answer.
    """

    front: str
    answer: str
    back: str
    asked: str = ""
    cue: str = ""

    @property
    def text(self) -> str:
        """As it stands in the context."""
        return self.front + self.answer + self.back


def hits(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that stand in a text as whole words: 4821 is not found in 48215."""
    found = [re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None for answer in answers]
    return sum(found) / len(found)


def tokens_of(text: str, tokenizer: Any) -> int:
    """Tokens of a prompt as the model gets it, special tokens included."""
    # verbose=False: a text longer than the tokenizer's own limit is what is wanted here, no reason for a warning
    return len(tokenizer(text, verbose=False)["input_ids"])


def fitted(build: Callable[[int], Example], least: int, length: int, tokenizer: Any) -> Example:
    """The longest example of a family whose query-first prompt has at most `length` tokens.

    Args:
        build: makes the example with so many units (filler sentences, pairs, words), each about alike in tokens.
        least: fewest units.
        length: most tokens.
        tokenizer: of the model.

    Raises:
        InputError: the smallest example is longer.
    """
    low, best = least, build(least)
    tokens = smallest = tokens_of(best.prompt(query_first=True), tokenizer)
    if tokens > length:
        raise InputError(
            f"length is {length} tokens, and the shortest text for task {best.task!r} has {tokens}; give {tokens} or "
            "more"
        )
    per_unit, high = 16.0, None
    for _ in range(TRIES):
        step = max(1, int((length - tokens) / per_unit))
        middle = low + step if high is None else min(low + step, high - 1)
        if middle == low:
            break
        example = build(middle)
        found = tokens_of(example.prompt(query_first=True), tokenizer)
        if found > length:
            high = middle
        else:
            low, best, tokens = middle, example, found
        per_unit = max((found - smallest) / (middle - least), 1e-6)
    return best
