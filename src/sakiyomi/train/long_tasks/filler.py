"""Text that has nothing to do with the question: sentences of our own, or those of the user's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

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
