"""Questions of ``bench spec`` and its result files.

Questions come in the form of FastChat's, which Spec-Bench and SPEED-Bench share, from files or our own:
``{"question_id": 81, "category": "writing", "turns": ["...", "..."]}``.

Result files are JSON Lines, the settings in the first one, then one for each question and drafter. A line stands on its
own: it has the laps of its drafter and those of plain decoding between them. So files with the same settings can be
joined, and a run continues where another has stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.files import whole_file
from sakiyomi.evaluation.bench.long.config import split_list
from sakiyomi.evaluation.bench.long.readers import read_rows, require
from sakiyomi.evaluation.bench.study import append, line, whole_lines

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


FORMAT = "sakiyomi bench spec 1"
PLAIN = "none"
Lap = Mapping[str, float]
"""tokens, seconds and prefill_seconds of one answer to all turns; rounds, committed, drafted and accepted."""


@dataclass(frozen=True)
class Record:
    """What one drafter made of one question.

    Attributes:
        question: its id.
        category: that it counts for.
        draft: spec of the drafter; "none": plain decoding.
        laps: of the drafter.
        plain: of plain decoding, each beside the lap of its place.
        equal: all answers are the plain ones, to the last token.
        explained: they are, or part where rounding decides.
        note: where and by how much they part.
        answers: texts of the plain answers, with its own record only.
    """

    question: int | str
    category: str
    draft: str
    laps: tuple[Lap, ...]
    plain: tuple[Lap, ...]
    equal: bool
    explained: bool
    note: str = ""
    answers: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON values; empty ones are left out."""
        return {name: value for name, value in vars(self).items() if value not in ("", ())}

    @classmethod
    def of(cls, value: Any) -> Record:
        """From such values.

        Raises:
            TypeError, KeyError, ValueError: they are no record's.
        """
        record = cls(**value)
        laps, plain = tuple(record.laps), tuple(record.plain)
        if not laps or len(laps) != len(plain) or not all(lap["seconds"] > 0 for lap in (*laps, *plain)):
            raise ValueError("laps")
        return replace(record, laps=laps, plain=plain, answers=tuple(record.answers))


@dataclass
class Results:
    """Records of one set of settings.

    Attributes:
        settings: what has to be the same in a file that they can be joined with.
        conditions: of the run that began the file.
        records: by question and drafter.
        path: file that gets new ones; None: none does.
    """

    settings: Mapping[str, Any]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    records: dict[tuple[int | str, str], Record] = field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def read(cls, path: str | Path) -> Results:
        """A file of results. A last line that was not written to its end is left out.

        Raises:
            LoadError: it cannot be read, or holds something else.
        """
        path = Path(path).expanduser()
        try:
            head, *lines = [*whole_lines(path)] or [""]
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"{str(path)!r} cannot be read ({error}); expected results of bench spec") from None
        try:
            first = json.loads(head)
            if first["format"] != FORMAT:
                raise ValueError(first["format"])
            found = cls(dict(first["settings"]), dict(first["conditions"]), path=path)
        except (ValueError, TypeError, KeyError):
            raise LoadError(f"{str(path)!r} holds no results of bench spec; name another file") from None
        for number, text in enumerate(lines, start=2):
            try:
                record = Record.of(json.loads(text))
            except (ValueError, TypeError, KeyError):
                raise LoadError(
                    f"line {number} of {str(path)!r} is no result of bench spec; delete that line"
                ) from None
            found.records[record.question, record.draft] = record
        return found

    @classmethod
    def begin(cls, path: str | Path | None, settings: Mapping[str, Any], conditions: Mapping[str, Any]) -> Results:
        """Go on with a file if it is there, or begin it.

        Raises:
            LoadError: it cannot be read or written, or holds something else.
            InputError: it was made with other settings.
        """
        fresh = cls(settings, conditions)
        if path is None:
            return fresh
        found = cls.kept(path)
        if found is None:
            found = replace(fresh, path=Path(path).expanduser())
        else:
            found.check(settings, "now")
        found.write()
        return found

    @classmethod
    def kept(cls, path: str | Path) -> Results | None:
        """What is in a file already; None: there is none, or it is empty.

        Raises:
            LoadError: it cannot be read, or holds something else; or there is no folder for it.
        """
        place = Path(path).expanduser()
        if not place.parent.is_dir():
            raise LoadError(f"cannot write {str(place)!r} (there is no such folder); choose another --out")
        empty = not place.exists() or (place.is_file() and not place.stat().st_size)
        return None if empty else cls.read(place)

    def check(self, settings: Mapping[str, Any], where: str) -> None:
        """Refuse to be joined with what was made otherwise.

        Raises:
            InputError: names the first settings that differ.
        """
        if apart := differences(self.settings, settings):
            said = "; ".join(f"{name} {old!r:.60}, {where} {new!r:.60}" for name, (old, new) in list(apart.items())[:3])
            raise InputError(
                f"{str(self.path)!r} was made with other settings ({said}); ask for the same, or name another file"
            )

    def add(self, records: Sequence[Record]) -> None:
        """Take records in, and write them behind the others.

        Raises:
            LoadError: they cannot be written.
        """
        self.records |= {(record.question, record.draft): record for record in records}
        if self.path is not None:
            append(self.path, [record.to_dict() for record in records], "choose another --out")

    def write(self) -> None:
        """Write the whole file anew: there may be hours of work in it.

        Raises:
            LoadError: it cannot be written.
        """
        assert self.path is not None
        head = {"format": FORMAT, "settings": dict(self.settings), "conditions": dict(self.conditions)}
        with whole_file(self.path, "choose another --out") as fresh:
            lines = [head, *(record.to_dict() for record in self.records.values())]
            fresh.write_text("".join(map(line, lines)), encoding="utf-8")


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the same, with both values."""
    names = dict.fromkeys([*one, *other])
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def join(several: Sequence[Results]) -> Results:
    """One set of results; of what several have, that of the last counts.

    Raises:
        InputError: they were made with other settings, or there is none.
    """
    if not several:
        raise InputError("no file was given; name one or more that bench spec has made")
    first = several[0]
    joined = Results(first.settings, first.conditions)
    for results in several:
        first.check(results.settings, f"in {str(results.path)!r}")
        joined.records |= results.records
    return joined
