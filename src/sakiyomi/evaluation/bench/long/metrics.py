"""How right answers to long-context questions are, 0 to 1. Knows no model and no file.

The rules are those that LongBench (arXiv 2308.14508), InfiniteBench (arXiv 2402.13718) and L-Eval (arXiv 2307.11088)
state; ``docs/long-contexts.md`` says where ours differ.
"""

from __future__ import annotations

import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

LETTERS = "ABCDEFGH"
Metric = Callable[[str, str, Sequence[str]], float]
"""Of an answer, the right one, and the texts of the choices or the names of the classes; 0 to 1."""
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SPACED = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces (as for SQuAD)."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", text).split())


def words(text: str) -> list[str]:
    """Normalised words."""
    return normalized(text).split()


def spoken(text: str) -> list[str]:
    """Words in lower case and without punctuation; articles count."""
    return re.findall(r"\w+", text.lower())


def characters(text: str) -> list[str]:
    """Of a language without spaces: characters that are no punctuation, in lower case."""
    return [c for c in text.lower() if not c.isspace() and not unicodedata.category(c).startswith("P")]


def _overlap(text: str, answer: str, split: Callable[[str], list[str]], common: Callable[[Any, Any], int]) -> float:
    """2 x items in common / items of both: the harmonic mean of the shares of either."""
    got, expected = split(text), split(answer)
    return 2 * found / (len(got) + len(expected)) if (found := common(got, expected)) else 0.0


def f1(text: str, answer: str, options: Sequence[str] = (), split: Callable[[str], list[str]] = words) -> float:
    """Overlap of words, each counted as often as it stands in both."""
    return _overlap(text, answer, split, lambda got, expected: (Counter(got) & Counter(expected)).total())


def rouge_l(text: str, answer: str, options: Sequence[str] = (), split: Callable[[str], list[str]] = spoken) -> float:
    """Overlap by the longest common subsequence, over the whole texts (Lin 2004, section 3.1)."""
    return _overlap(text, answer, split, common_length)


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


def first_line(text: str) -> str:
    """The first line with something in it."""
    return next((line for line in text.splitlines() if line.strip()), "")


def best_letter(text: str, letters: str = "ABCD") -> str | None:
    """The choice that an answer names: its first letter that stands alone, "B", "(B)", "B. The fox"; None if none does.

    An "A" is taken for a word, not for a choice, where a small letter follows after a space ("A fox").
    """
    for found in re.finditer(rf"(?<![A-Za-z'])([{letters}])(?![A-Za-z'])", text):
        if found[1] != "A" or not re.match(r"\s[a-z]", text[found.end() :]):
            return found[1]
    return None


def _letter(answer: str, options: Sequence[str]) -> str:
    """The letter of an answer that is given as the text of its choice, or as the letter itself."""
    return LETTERS[options.index(answer)] if answer in options else answer


def choice(text: str, answer: str, options: Sequence[str]) -> float:
    """1 if the answer's letter is named."""
    return float(best_letter(text) == _letter(answer, options))


def choice_or_name(text: str, answer: str, options: Sequence[str]) -> float:
    """1 if the answer's letter is named, or the choice itself."""
    named = answer in options and re.search(rf"\b{re.escape(answer)}\b", text)
    return max(choice(text, answer, options), float(bool(named)))


def choices(text: str, answer: str, options: Sequence[str]) -> float:
    """1 if the letters of the answer are named, all of them where several are right."""
    if len(answer) == 1:
        return float(best_letter(text) == answer)
    named = re.match(r"[\s(]*([A-D]+)", text)
    return float(named is not None and set(named[1]) == set(answer))


def classification(text: str, answer: str, options: Sequence[str]) -> float:
    """1 / number of classes named, if the right one is among them.

    A class whose name is part of the right one's does not count as named.
    """
    named = [name for name in options if name in text and not (name in answer and name != answer)]
    return 1 / len(named) if answer in named else 0.0


def retrieval(text: str, answer: str, options: Sequence[str] = ()) -> float:
    """Share of the numbers in a text that are the one in the answer ("Paragraph 7", "段落7"); 0 where there is none."""
    found, wanted = re.findall(r"\d+", text), re.search(r"\d+", answer)
    return found.count(wanted[0]) / len(found) if found and wanted else 0.0


def code_similarity(text: str, answer: str, options: Sequence[str] = ()) -> float:
    """Similarity of the first line of code to the right one: 2 x common subsequence / characters of both.

    Lines with a comment mark or a backquote are no code. This is what ``fuzz.ratio`` computes with a substitution
    counted as two edits.
    """
    lines = (line for line in text.lstrip("\n").split("\n") if not re.search(r"[`#]|//", line))
    line = next(lines, "")
    return 2 * common_length(line, answer) / (len(line) + len(answer)) if line or answer else 1.0


def contains_word(text: str, answer: str, options: Sequence[str] = (), *, upper: bool = False) -> float:
    """1 if the answer is a word of the text, punctuation aside; ``upper``: in any case."""
    text, answer = (text.upper(), answer.upper()) if upper else (text, answer)
    return float(answer in text.translate(_SPACED).split())


def first_number(text: str, answer: str, options: Sequence[str] = ()) -> float:
    """1 if the first digits are those of the answer."""
    found = re.search(r"\d+", text)
    return float(found is not None and found[0] == answer)


def value(text: str, answer: str, options: Sequence[str] = ()) -> float:
    """1 if the first number has the value of the answer."""
    found = re.search(r"\d+(?:\.\d+)?", text)
    return float(found is not None and float(found[0]) == float(answer))


def last_number(text: str, answer: str, options: Sequence[str] = ()) -> float:
    """1 if the last word is the answer."""
    return float(re.sub("[\n.`'\":]", " ", text).split()[-1:] == [answer])


def prefix_share(text: str, answer: str, options: Sequence[str] = ()) -> float:
    """Share of a list of numbers that is right from its beginning up to the first wrong one."""
    wanted = answer.split()
    pairs = zip(map(int, re.findall(r"\d+", text)), map(int, wanted), strict=False)
    right = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return right / len(wanted) if wanted else 0.0


def number_said(text: str, answer: str, options: Sequence[str] = ()) -> float:
    """1 if the number after "the answer is" is right, else the last of the first paragraph, which ends a reasoning."""
    said = re.search(r"[Tt]he answer is\D*?(-?\d[\d,]*)", text)
    found = [said[1]] if said else re.findall(r"-?\d[\d,]*", re.sub(r"\.\d+", "", text.strip().split("\n\n")[0]))
    got, expected = (re.sub(r"\D", "", number) for number in ((found or [""])[-1], answer.split(".")[0]))
    return float(bool(found) and got == expected)


def _of_first_line(metric: Metric) -> Metric:
    """Of few-shot tasks: a model writes the next example too, and only its first line is the answer."""
    return lambda text, answer, options: metric(text.lstrip("\n").split("\n")[0], answer, options)


METRICS: dict[str, Metric] = {
    "choice": choice,
    "choice or name": choice_or_name,
    "classes in the first line": _of_first_line(classification),
    "code": code_similarity,
    "count": retrieval,
    "f1": f1,
    "f1 of characters": partial(f1, split=characters),
    "f1 of the first line": _of_first_line(f1),
    "first line": lambda text, answer, options: float(normalized(first_line(text)) == normalized(answer)),
    "first number": first_number,
    "last number": last_number,
    "letters": choices,
    "name": partial(contains_word, upper=True),
    "number after reasoning": number_said,
    "numbers from the first": prefix_share,
    "retrieval": retrieval,
    "rouge": rouge_l,
    "rouge of characters": partial(rouge_l, split=characters),
    "rouge of the first line": _of_first_line(rouge_l),
    "value": value,
    "word": contains_word,
}
"""By the words of ``tasks.toml``."""
