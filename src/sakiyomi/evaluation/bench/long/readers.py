"""Questions from the user's files, in the formats of three collections: L-Eval, LongBench, InfiniteBench.

Knows no model and no tokenizer. A new form is a reader in ``READERS``; a new task of a collection is a line in
``tasks.toml``.
"""

from __future__ import annotations

import gzip
import json
import re
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.evaluation.bench.long.metrics import LETTERS, METRICS

KINDS = {str: "a text", list: "a list", int: "a number"}
"""Of values of JSON, for messages."""


def read_rows(path: Path, needs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Objects of a .jsonl file (or .jsonl.gz), one a line.

    Args:
        path: of the file.
        needs: keys that each must have, with the kind of their values; object: any.

    Raises:
        LoadError: the file cannot be read, or a line is no such object.
        InputError: it holds nothing.
    """
    number = 0
    for number, line in enumerate(filter(str.strip, _read(path).splitlines()), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        wanted = f"expected a JSON object{' with ' if needs else ''}{', '.join(needs)}"
        if not isinstance(row, dict):
            raise LoadError(f"row {number} of {str(path)!r} is {line.strip()!r:.60}; {wanted}")
        for key, kind in needs.items():
            if key not in row:
                raise LoadError(f"row {number} of {str(path)!r} has no {key!r}; {wanted}")
            if not isinstance(row[key], kind):
                said = " or ".join(KINDS[one] for one in get_args(kind) or (kind,))
                raise LoadError(f"{key!r} in row {number} of {str(path)!r} is {row[key]!r:.60}; it has to be {said}")
        yield row
    if not number:
        raise InputError(f"there is no question in {str(path)!r}; expected a JSON object a line")


def read_object(path: Path) -> Mapping[str, Any]:
    """A JSON file that holds one object.

    Raises:
        LoadError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise LoadError(f"{str(path)!r} is no JSON ({error}); copy the file again") from None
    if not isinstance(value, dict):
        raise LoadError(f"{str(path)!r} holds no JSON object; expected one with an entry for each task")
    return value


def _read(path: Path) -> str:
    try:
        raw = path.expanduser().read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise LoadError(f"{str(path)!r} cannot be read ({error}); expected a .jsonl file") from None


HIDDEN = (
    "Something important is hidden in a long text. Find it and remember it; a question about it follows.\n\n{context}"
    "\n\n{input}\n"
)
OPEN = {"f1": (64, "f1"), "rouge": (512, "rouge")}
"""Kinds of open questions of L-Eval, with most tokens of an answer and the metric."""
_CHOICE = re.compile(r"\s*\(?([A-D]{1,4})\)?(?=[\s.,:)]|$)")


@dataclass(frozen=True)
class Item:
    """One question of a file.

    Attributes:
        task: that it belongs to.
        prompt: text; long ones are cut in the middle later, when they are tokens.
        answer_tokens: most that an answer may have.
        metric: of ``metrics.METRICS``.
        answers: right ones; the best counts.
        options: texts of the choices, or names of the classes.
    """

    task: str
    prompt: str
    answer_tokens: int
    metric: str
    answers: Sequence[str]
    options: Sequence[str] = ()

    def score(self, text: str) -> float:
        """Of an answer, 0 to 1."""
        return max((METRICS[self.metric](text, answer, self.options) for answer in self.answers), default=0.0)


@cache
def _tasks(collection: str) -> dict[str, Any]:
    text = Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)[collection])


def read_leval(path: Path, templates: Path | None = None) -> Iterator[Item]:
    """L-Eval (An et al. 2023, arXiv 2307.11088): questions of ``{input, instructions, outputs, evaluation}`` rows.

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
    for row in read_rows(path, {"input": str, "instructions": list, "outputs": list}):
        kind = row.get("evaluation", "exam")
        if kind != "exam" and kind not in OPEN:
            continue
        questions, answers = ([str(text) for text in row[key]] for key in ("instructions", "outputs"))
        if len(questions) != len(answers):
            raise LoadError(
                f"a row of {str(path)!r} has {len(questions)} instructions and {len(answers)} outputs; expected one "
                "output for each instruction"
            )
        for question, answer in zip(questions, answers, strict=True):
            judged += 1
            tokens, metric, right = _exam(answer) if kind == "exam" else (*OPEN[kind], answer)
            yield Item(task, _leval_prompt(row["input"], question, metric), tokens, metric, [right])
    if not judged:
        raise InputError(f"every row of {str(path)!r} is to be judged by a person or a model; choose another file")


def _exam(answer: str) -> tuple[int, str, str]:
    """Most tokens of an answer, its metric, and what is right."""
    if choice := _CHOICE.match(answer):
        return 32, "letters", choice[1]
    if re.fullmatch(r"-?[\d,.]+", answer.strip()):
        return 256, "number after reasoning", answer
    return 32, "first line", answer


def _leval_prompt(document: str, question: str, metric: str) -> str:
    if question.rstrip().endswith("step by step"):  # the document is a list of solved ones, and this the next
        return f"{document.rstrip()}\n\n{question}"
    hint = " Answer with the letter of the right choice." if metric == "letters" else ""
    return f"{document.rstrip()}\n\nAnswer the question about the text above.{hint}\nQuestion: {question}\nAnswer:"


def read_longbench(path: Path, templates: Path | None = None) -> Iterator[Item]:
    """LongBench: questions of ``{input, context, answers, all_classes, dataset}`` rows.

    Args:
        path: a .jsonl file.
        templates: folder with ``dataset2prompt.json`` and ``dataset2maxlen.json`` (longer names that end so will do);
            None: that of the file.

    Raises:
        LoadError: a file cannot be read.
        InputError: a task is not known, or has no template.
    """
    folder, metrics = path.parent if templates is None else templates, _tasks("longbench")
    prompts, lengths = (read_object(_find(folder, name)) for name in ("dataset2prompt.json", "dataset2maxlen.json"))
    for row in read_rows(path, {"input": object, "context": object, "answers": list, "dataset": object}):
        name = str(row["dataset"])
        task = name.removesuffix("_e")  # of LongBench-E, which has the same tasks at even lengths
        if task not in metrics or task not in prompts or task not in lengths:
            raise InputError(f"dataset {name!r} in {str(path)!r} is not known; known are {', '.join(metrics)}")
        prompt = str(prompts[task]).replace("{context}", str(row["context"])).replace("{input}", str(row["input"]))
        yield Item(
            task, prompt, int(lengths[task]), metrics[task], _texts(row["answers"]), _texts(row.get("all_classes"))
        )


def _find(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"*{name}"), key=lambda path: (path.name != name, path)) if folder.is_dir() else []
    if not found:
        raise LoadError(
            f"there is no {name} in {str(folder)!r}; it is in LongBench's folder config, and --templates names its "
            "folder"
        )
    return found[0]


def _texts(values: Any) -> list[str]:
    return [str(value) for value in values or ()]


def read_infinitebench(path: Path, templates: Path | None = None) -> Iterator[Item]:
    """InfiniteBench: questions of ``{id, context, input, answer, options}`` rows.

    Args:
        path: a .jsonl file; its name is the task.
        templates: not used.

    Raises:
        LoadError: the file cannot be read.
        InputError: its name is no task.
    """
    name, tasks = path.name.split(".")[0], _tasks("infinitebench")
    if name not in tasks:
        raise InputError(f"{path.name!r} is no task of InfiniteBench; name the file as it comes: {', '.join(tasks)}")
    task = tasks[name]
    for row in read_rows(path, dict.fromkeys(("context", "input", "answer"), object)):
        answers = _texts(row["answer"] if isinstance(row["answer"], list) else [row["answer"]])
        if task["metric"] == "numbers from the first":  # all of them are one answer
            answers = [" ".join(answers)]
        options = _texts(row.get("options"))
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
        prompt = task["prompt"].replace("{hidden}", HIDDEN)
        for key, value in (("context", row["context"]), ("input", row["input"]), ("options", listed)):
            prompt = prompt.replace(f"{{{key}}}", str(value))
        yield Item(name, prompt, task["tokens"], task["metric"], answers, options)


READERS: dict[str, Callable[[Path, Path | None], Iterator[Item]]] = {
    "leval": read_leval,
    "longbench": read_longbench,
    "infinitebench": read_infinitebench,
}
