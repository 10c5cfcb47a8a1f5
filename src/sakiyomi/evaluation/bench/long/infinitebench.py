"""InfiniteBench's files (Zhang et al. 2024, arXiv 2402.13718). The task is the file's name, as it comes: passkey.jsonl.

The instructions around context and question are our own words, the same for every system.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.long import metrics
from sakiyomi.evaluation.bench.long.files import Item, read_rows

__all__ = ["TASKS", "read_infinitebench"]


class Score(Protocol):
    """Judges an answer."""

    def __call__(self, text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
        """0 to 1; ``options`` are the texts of the choices."""
        ...


def _first_number(text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
    return float(metrics.first_number(text) == str(answers[0]))


def _pair(text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
    return metrics.contains_word(text, str(answers[0]))


def _name(text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
    return max(metrics.contains_word(text, str(answer).upper(), upper=True) for answer in answers)


def _choice(text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
    return float(metrics.best_letter(text) in [_letter(str(answer), options) for answer in answers])


def _function(text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
    """The letter, or the name of the function itself."""
    named = any(re.search(rf"\b{re.escape(str(answer))}\b", text) for answer in answers if str(answer) in options)
    return max(_choice(text, answers, options), float(named))


def _overlap(text: str, answers: Sequence[Any], options: Sequence[str], *, characters: bool = False) -> float:
    return max(metrics.f1(text, str(answer), characters=characters) for answer in answers)


def _summary(text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
    return max(metrics.rouge_l(text, str(answer)) for answer in answers)


def _value(text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
    found = re.search(r"\d+(?:\.\d+)?", text)
    return float(found is not None and float(found[0]) == float(answers[0]))


def _values(text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
    return metrics.prefix_share(text, [int(answer) for answer in answers])


def _last_number(text: str, answers: Sequence[Any], options: Sequence[str]) -> float:
    words = re.sub("[\n.`'\":]", " ", text).split()
    return float(bool(words) and words[-1] == str(answers[0]))


_HIDDEN = (
    "Something important is hidden in a long text. Find it and remember it; a question about it follows.\n\n{context}"
    "\n\n{input}\n"
)
_READ = "Read the text and answer the question about it, in a few words.\n\n{context}\n\nQuestion: {input}\nAnswer:"
_PICK = (
    "Read the text and answer the question with the letter of the right choice.\n\n{context}\n\nQuestion: {input}\n"
    "{options}\nAnswer:"
)

TASKS: dict[str, tuple[str, int, Score]] = {
    "passkey": (_HIDDEN + "The pass key is", 6, _first_number),
    "number_string": (_HIDDEN + "The sequence of digits is", 12, _first_number),
    "kv_retrieval": ("Find the value of a key in the JSON object below.\n\n{context}\n\n{input}", 50, _pair),
    "longdialogue_qa_eng": (
        "In the script below, one name is hidden behind $$MASK$$. Say who it is.\n\n{context}\n\nThe name is",
        40,
        _name,
    ),
    "longbook_sum_eng": ("Summarise the book below.\n\n{context}\n\nSummary:", 1200, _summary),
    "longbook_choice_eng": (_PICK, 40, _choice),
    "longbook_qa_eng": (_READ, 40, _overlap),
    "longbook_qa_chn": (
        "阅读下面的书，用几个字回答问题。\n\n{context}\n\n问题：{input}\n回答：",
        40,
        partial(_overlap, characters=True),
    ),
    "math_find": ("{context}\n\n{input}\nAnswer:", 3, _value),
    "math_calc": ("{context}\n\n{input}\nIntermediate results, in order:", 30_000, _values),
    "code_run": (
        "Here are Python functions that call each other.\n\n{context}\n\n{input}\nThe value is",
        5,
        _last_number,
    ),
    "code_debug": (
        "One function of the code below was given an obvious mistake. Answer with the letter of its name.\n\n{context}"
        "\n\n{input}\n{options}\nAnswer:",
        5,
        _function,
    ),
}
"""Words around a question, most tokens of an answer, and the rule."""


def read_infinitebench(path: Path, templates: Path | None = None) -> Iterator[Item]:
    """Questions of ``{id, context, input, answer, options}`` rows.

    Args:
        path: a .jsonl file; its name is the task.
        templates: not used.

    Raises:
        LoadError: the file cannot be read.
        InputError: its name is no task.
    """
    task = path.name.split(".")[0]
    if task not in TASKS:
        raise InputError(f"{path.name!r} is no task of InfiniteBench; name the file as it comes: {', '.join(TASKS)}")
    template, tokens, score = TASKS[task]
    for row in read_rows(path, needs=("context", "input", "answer")):
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        options = [str(option) for option in row.get("options") or ()]
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCDEFGH", options, strict=False))
        prompt = template
        for name, value in (("context", row["context"]), ("input", row["input"]), ("options", listed)):
            prompt = prompt.replace(f"{{{name}}}", str(value))
        yield Item(task, prompt, tokens, partial(score, answers=answers, options=options))


def _letter(answer: str, options: Sequence[str]) -> str:
    """The letter of an answer that is given as the text of its choice, or as the letter itself."""
    return "ABCDEFGH"[options.index(answer)] if answer in options else answer
