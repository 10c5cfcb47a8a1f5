"""How right answers to long-context questions are, 0 to 1. Knows no model and no file.

The rules are those that LongBench (arXiv 2308.14508), InfiniteBench (arXiv 2402.13718) and L-Eval (arXiv 2307.11088)
state; ``docs/long-contexts.md`` says where ours differ.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence

__all__ = [
    "best_letter",
    "classification",
    "code_similarity",
    "common_length",
    "contains_word",
    "count",
    "f1",
    "first_number",
    "matches",
    "normalized",
    "prefix_share",
    "retrieval",
    "rouge_l",
]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SPACED = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces (as for SQuAD)."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", text).split())


def words(text: str, *, characters: bool = False) -> list[str]:
    """What overlap is counted in: normalised words, or, of a language without spaces, characters that are no
    punctuation.
    """
    if not characters:
        return normalized(text).split()
    return [c for c in text.lower() if not c.isspace() and not unicodedata.category(c).startswith("P")]


def f1(text: str, answer: str, *, characters: bool = False) -> float:
    """Harmonic mean of the shares of words in common, each counted as often as it stands in both."""
    got, expected = words(text, characters=characters), words(answer, characters=characters)
    common = sum((Counter(got) & Counter(expected)).values())
    return 2 * common / (len(got) + len(expected)) if common else 0.0


def rouge_l(text: str, answer: str, *, characters: bool = False) -> float:
    """F1 of the longest common subsequence of words, over the whole texts (Lin 2004, section 3.1).

    Words are in lower case and without punctuation; articles count.
    """
    got, expected = (
        words(each, characters=True) if characters else re.findall(r"\w+", each.lower()) for each in (text, answer)
    )
    common = common_length(got, expected)
    return 2 * common / (len(got) + len(expected)) if common else 0.0


def common_length(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence.

    Rows of bits (Crochemore et al. 2001): a zero in ``row`` marks an item of ``first`` where the length grows by one.
    Python's integers make each step one operation, so that summaries of some thousand words take milliseconds.
    """
    places: dict[Hashable, int] = {}
    for i, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << i
    full = (1 << len(first)) - 1
    row = full
    for item in second:
        match = row & places.get(item, 0)
        row = ((row + match) | (row - match)) & full
    return len(first) - row.bit_count()


def matches(text: str, answer: str) -> float:
    """1 if the first line is the answer, both normalised."""
    return float(normalized(first_line(text)) == normalized(answer))


def first_line(text: str) -> str:
    """The first line with something in it."""
    return next((line for line in text.splitlines() if line.strip()), "")


def best_letter(text: str, letters: str = "ABCD") -> str | None:
    """The choice that an answer names: its first letter that stands alone, "B", "(B)", "B. The fox"; None if none does.

    An "A" is taken for a word, not for a choice, where a small letter follows behind a space ("A fox").
    """
    for found in re.finditer(rf"(?<![A-Za-z'])([{letters}])(?![A-Za-z'])", text):
        if found[1] != "A" or not re.match(r"\s[a-z]", text[found.end() :]):
            return found[1]
    return None


def classification(text: str, answer: str, classes: Sequence[str]) -> float:
    """1 / number of classes named, if the right one is among them.

    A class whose name is part of the right one's does not count as named.
    """
    named = [name for name in classes if name in text and not (name in answer and name != answer)]
    return 1 / len(named) if answer in named else 0.0


def retrieval(text: str, answer: str) -> float:
    """Share of the numbers in a text that are the one in the answer ("Paragraph 7", "段落7")."""
    wanted = re.search(r"\d+", answer)
    return count(text, wanted[0]) if wanted else 0.0


def count(text: str, answer: str) -> float:
    """Share of the numbers in a text that are the right one; 0 where there is none."""
    found = re.findall(r"\d+", text)
    return sum(number == str(answer).strip() for number in found) / len(found) if found else 0.0


def code_similarity(text: str, answer: str) -> float:
    """Similarity of the first line of code to the right one: 2 x common subsequence / characters of both.

    Lines with a comment mark or a backquote are no code. This is what ``fuzz.ratio`` computes with a substitution
    counted as two edits.
    """
    lines = (line for line in text.lstrip("\n").split("\n") if not re.search(r"[`#]|//", line))
    line = next(lines, "")
    return 2 * common_length(line, answer) / (len(line) + len(answer)) if line or answer else 1.0


def first_number(text: str) -> str | None:
    """The first digits in a text."""
    found = re.search(r"\d+", text)
    return found[0] if found else None


def contains_word(text: str, answer: str, *, upper: bool = False) -> float:
    """1 if the answer is a word of the text, punctuation aside."""
    found = text.translate(_SPACED).split()
    return float(answer in ([word.upper() for word in found] if upper else found))


def prefix_share(text: str, answers: Sequence[int]) -> float:
    """Share of a list of numbers that is right from its beginning up to the first wrong one."""
    right = 0
    for number, answer in zip(re.findall(r"\d+", text), answers, strict=False):
        if int(number) != answer:
            break
        right += 1
    return right / len(answers) if answers else 0.0
