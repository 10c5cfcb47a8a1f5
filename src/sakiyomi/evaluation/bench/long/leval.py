"""L-Eval's files (An et al. 2023, arXiv 2307.11088): a long text with several instructions and their answers a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.long import metrics
from sakiyomi.evaluation.bench.long.files import Item, read_rows, require

__all__ = ["read_leval"]

_OPEN = {"f1": (64, metrics.f1), "rouge": (512, metrics.rouge_l)}
_CHOICE = re.compile(r"\s*\(?([A-D]{1,4})\)?(?=[\s.,:)]|$)")


def read_leval(path: Path, templates: Path | None = None) -> Iterator[Item]:
    """Questions of ``{input, instructions, outputs, evaluation}`` rows.

    ``evaluation`` is "exam" (a choice, a number or a short text, right or wrong), "f1" or "rouge". Rows that a person
    or a model is to judge are left out.

    Args:
        path: a .jsonl file.
        templates: not used: the instructions are whole questions.

    Raises:
        LoadError, InputError: the file cannot be read, or has no row that a rule can judge.
    """
    judged = 0
    task = path.name.split(".")[0]
    for row in read_rows(path, needs=("input", "instructions", "outputs")):
        kind = row.get("evaluation", "exam")
        if kind != "exam" and kind not in _OPEN:
            continue
        document = require(row, "input", str, path)
        questions, answers = (require(row, key, list, path) for key in ("instructions", "outputs"))
        for question, answer in zip(questions, answers, strict=True):
            judged += 1
            tokens, score = _judge(kind, str(answer))
            yield Item(task, _prompt(document, str(question), kind, str(answer)), tokens, score)
    if not judged:
        raise InputError(f"every row of {str(path)!r} is to be judged by a person or a model; choose another file")


def _judge(kind: str, answer: str) -> tuple[int, Callable[[str], float]]:
    if kind in _OPEN:
        tokens, metric = _OPEN[kind]
        return tokens, partial(metric, answer=answer)
    choice = _CHOICE.match(answer)
    if choice:
        return 32, partial(_choices, letters=choice[1])
    if re.fullmatch(r"-?[\d,.]+", answer.strip()):
        return 256, partial(_last_number, answer=answer)
    return 32, partial(metrics.matches, answer=answer)


def _choices(text: str, letters: str) -> float:
    if len(letters) == 1:
        return float(metrics.best_letter(text) == letters)
    named = re.match(r"[\s(]*([A-D]+)", text)  # several are right, and all of them count
    return float(named is not None and sorted(set(named[1])) == sorted(set(letters)))


def _last_number(text: str, answer: str) -> float:
    """The number behind "the answer is", else the last one of the first paragraph, which ends a chain of reasoning."""
    said = re.search(r"[Tt]he answer is\D*?(-?\d[\d,]*)", text)
    found = [said[1]] if said else re.findall(r"-?\d[\d,]*", re.sub(r"\.\d+", "", text.strip().split("\n\n")[0]))
    return float(bool(found) and _digits(found[-1]) == _digits(answer.split(".")[0]))


def _digits(text: str) -> str:
    return re.sub(r"\D", "", text)


def _prompt(document: str, question: str, kind: str, answer: str) -> str:
    if question.rstrip().endswith("step by step"):  # the document is a list of solved ones, and this the next
        return f"{document.rstrip()}\n\n{question}"
    hint = " Answer with the letter of the right choice." if kind == "exam" and _CHOICE.match(answer) else ""
    return f"{document.rstrip()}\n\nAnswer the question about the text above.{hint}\nQuestion: {question}\nAnswer:"
