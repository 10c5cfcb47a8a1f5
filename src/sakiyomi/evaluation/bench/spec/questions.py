"""Questions of several kinds: from files in the form of FastChat's, which Spec-Bench and SPEED-Bench share, or our own.

A line is ``{"question_id": 81, "category": "writing", "turns": ["...", "..."]}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.evaluation.bench.long.config import split_list
from sakiyomi.evaluation.bench.long.files import read_rows, require

__all__ = ["Question", "chosen", "digest", "own_questions", "read_questions"]

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
SPEC_BENCH = "math_reasoning"
"""A category of Spec-Bench alone: in a file that has it those of MT-bench count as one, as its tables have it."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        id: tells it from the others of its file.
        category: that it counts for.
        turns: what is said, one after the other, each behind the answer to the last.
        kind: the file's own category.
    """

    id: int | str
    category: str
    turns: tuple[str, ...]
    kind: str


def read_questions(path: str | Path) -> list[Question]:
    """All questions of a .jsonl (or .jsonl.gz).

    Raises:
        LoadError: it cannot be read, or is of another form.
        InputError: it holds nothing.
    """
    path = Path(path).expanduser()
    found: list[Question] = []
    for row in read_rows(path, needs=("question_id", "category", "turns")):
        turns = require(row, "turns", list, path)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise LoadError(f"'turns' in {str(path)!r} is {turns!r:.60}; it has to be a list of texts")
        kind = require(row, "category", str, path)
        found.append(Question(require(row, "question_id", (int, str), path), kind, tuple(turns), kind))
    seen: set[int | str] = set()
    for question in found:
        if question.id in seen:
            raise LoadError(f"question_id {question.id!r} stands twice in {str(path)!r}; each has to have its own")
        seen.add(question.id)
    if any(question.kind == SPEC_BENCH for question in found):
        return [Question(q.id, "mt-bench" if q.kind in MT_BENCH else q.kind, q.turns, q.kind) for q in found]
    return found


def own_questions() -> list[Question]:
    """A few that travel with the package, in the categories of SPEED-Bench (arXiv 2604.09557); written for this."""
    return read_questions(Path(__file__).with_name("own.jsonl"))


def chosen(questions: Sequence[Question], categories: Sequence[str], count: int) -> list[Question]:
    """Of each category the first so many; only these categories, if some are named.

    Raises:
        InputError: one of them is not there.
    """
    wanted = split_list(categories)
    known = dict.fromkeys(name for question in questions for name in (question.category, question.kind))
    if unknown := [name for name in wanted if name not in known]:
        raise InputError(f"there is no category {unknown[0]!r}; these questions have {', '.join(known)}")
    taken: dict[str, int] = {}
    found = []
    for question in questions:
        if wanted and not {question.category, question.kind} & set(wanted):
            continue
        taken[question.category] = taken.get(question.category, 0) + 1
        if taken[question.category] <= count:
            found.append(question)
    return found


def digest(questions: Sequence[Question]) -> str:
    """Tells two sets of questions apart, as hexadecimal digits."""
    text = json.dumps([[q.id, q.category, q.turns] for q in questions])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
