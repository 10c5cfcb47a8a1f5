"""Sentences with mistakes in them, beside the sentences as they were: pairs for a model that corrects.

Every mistake can be told from the text alone, so that one answer is right: a slip never makes another word of the text,
and a comma is only taken from where the language of the text always has one. Knows no tokens and no model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

__all__ = ["Spoiler", "sentences"]

OPENERS = (
    "One day", "One sunny day", "The next day", "From that day on", "In the end", "After a while", "Once upon a time",
    "Suddenly", "Finally",
)  # fmt: skip
"""Beginnings of sentences with a comma behind them; where a text has none, the right answer has it all the same."""

SHORTEST_SLIP = 4
"""Letters of the shortest word that gets a slip: of shorter ones too many slips are words again."""

FREQUENT = 20
"""Times that a word has to stand in the text before a slip is made in it: a word seen once cannot be put right."""

WORDS_A_MISTAKE = 9
"""About so many words to one mistake."""

_OPENER = re.compile(rf"\b({'|'.join(OPENERS)}) (?=[a-zA-Z])")
_WORD = re.compile(r"[A-Za-z']+")
_SENTENCE = re.compile(r"(?<=[.!?])[\"']? +(?=[\"'A-Z])")
_PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "."})


def sentences(text: str) -> list[str]:
    """The sentences of a text, on one line each, with plain quotation marks and the commas of ``OPENERS``."""
    flat = " ".join(text.translate(_PLAIN).split())
    flat = _OPENER.sub(r"\1, ", flat)
    found, start = [], 0
    for border in _SENTENCE.finditer(flat):
        found.append(flat[start : border.end()].strip())
        start = border.end()
    return [sentence for sentence in [*found, flat[start:].strip()] if sentence]


class Spoiler:
    """Makes mistakes in sentences.

    Args:
        texts: what the sentences are taken from; its words are those that a slip must not make.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        counts = Counter(word for text in texts for word in _WORD.findall(text))
        self._words = frozenset(word.lower() for word in counts)
        self._known = frozenset(word for word, count in counts.items() if count >= FREQUENT)
        self._kinds: tuple[tuple[Callable[[str, np.random.Generator], str], float], ...] = (
            (self._slip, 4.0),
            (_twice, 1.5),
            (_lower, 2.0),
            (_joined, 1.0),
            (_without_comma, 1.5),
        )

    def spoil(self, text: str, rng: np.random.Generator) -> str:
        """The text with about one mistake to ``WORDS_A_MISTAKE`` words, at least one where one can be made."""
        count = 1 + int(rng.binomial(len(text.split()), 1 / WORDS_A_MISTAKE))
        weights = np.array([weight for _, weight in self._kinds])
        for choice in rng.choice(len(weights), size=count, p=weights / weights.sum()):
            text = self._kinds[choice][0](text, rng)
        return text

    def _slip(self, text: str, rng: np.random.Generator) -> str:
        """Two letters exchanged, one left out, or one twice, behind the first letter of a word."""
        words = [
            word for word in _WORD.finditer(text) if word[0] in self._known and len(word[0].strip("'")) >= SHORTEST_SLIP
        ]
        if not words:
            return text
        word = words[int(rng.integers(len(words)))]
        letters, place = word[0], int(rng.integers(1, len(word[0]) - 1))
        slips = (
            letters[:place] + letters[place + 1] + letters[place] + letters[place + 2 :],
            letters[:place] + letters[place + 1 :],
            letters[:place] + letters[place] + letters[place:],
        )
        slip = slips[int(rng.integers(len(slips)))]
        if slip.lower() in self._words:
            return text
        return text[: word.start()] + slip + text[word.end() :]


def _pick(matches: Sequence[re.Match[str]], rng: np.random.Generator) -> re.Match[str] | None:
    return matches[int(rng.integers(len(matches)))] if matches else None


def _twice(text: str, rng: np.random.Generator) -> str:
    """A word twice."""
    word = _pick(list(re.finditer(r"\b[a-z]+(?= )", text)), rng)
    return text if word is None else f"{text[: word.end()]} {text[word.start() :]}"


def _lower(text: str, rng: np.random.Generator) -> str:
    """A capital letter made small: of a name, or of the beginning of a sentence."""
    capital = _pick(list(re.finditer(r"\b[A-Z](?=[a-z])", text)), rng)
    return text if capital is None else text[: capital.start()] + capital[0].lower() + text[capital.end() :]


def _joined(text: str, rng: np.random.Generator) -> str:
    """Two words without the space between them."""
    space = _pick(list(re.finditer(r"(?<=[a-z]) (?=[a-z])", text)), rng)
    return text if space is None else text[: space.start()] + text[space.end() :]


def _without_comma(text: str, rng: np.random.Generator) -> str:
    """A comma left out behind an opener, or before words that somebody says."""
    comma = _pick(list(re.finditer(rf"(?<=said),(?= \")|(?:{'|'.join(OPENERS)})(,)(?= )", text)), rng)
    if comma is None:
        return text
    return text[: comma.end() - 1] + text[comma.end() :]
