"""Questions of ``bench spec`` and its result files.

Questions come in the form of FastChat's, which Spec-Bench and SPEED-Bench share, from files or our own:
``{"question_id": 81, "category": "writing", "turns": ["...", "..."]}``.

Result files are JSON Lines, the settings in the first one, then one for each question and drafter. Each line has
the runs of its drafter and the runs of plain decoding that were interleaved with them. So files with the same settings
can be joined, and a stopped run can be continued.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.files import whole_file
from sakiyomi.evaluation.bench.long.config import split_list
from sakiyomi.evaluation.bench.long.readers import read_rows
from sakiyomi.evaluation.bench.study import line, whole_lines

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
SPEC_BENCH = "math_reasoning"
"""A category of Spec-Bench alone: in a file that has it those of MT-bench count as one, as its tables have it."""


@dataclass(frozen=True)
class Question:
    """A question of one or more turns.

    Attributes:
        id: unique in its file.
        category: the column of the tables that it counts for.
        turns: user messages; each follows the answer to the one before.
        kind: the category as the file names it.
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
    found: dict[int | str, Question] = {}
    for row in read_rows(path, {"question_id": int | str, "category": str, "turns": list}):
        turns, kind = row["turns"], row["category"]
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise LoadError(f"'turns' in {str(path)!r} is {turns!r:.60}; it has to be a list of texts")
        question = Question(row["question_id"], kind, tuple(turns), kind)
        if question.id in found:
            raise LoadError(f"question_id {question.id!r} stands twice in {str(path)!r}; each has to have its own")
        found[question.id] = question
    joined = MT_BENCH if any(question.kind == SPEC_BENCH for question in found.values()) else ()
    return [replace(one, category="mt-bench") if one.kind in joined else one for one in found.values()]


def own_questions() -> list[Question]:
    """Questions that come with the package, in the categories of SPEED-Bench (arXiv 2604.09557)."""
    return read_questions(Path(__file__).with_name("own.jsonl"))


def chosen(questions: Sequence[Question], categories: Sequence[str], count: int) -> list[Question]:
    """The first ``count`` questions of each category; only of these categories, if some are named.

    Raises:
        InputError: one of them is not there.
    """
    wanted = split_list(categories)
    known = dict.fromkeys(name for question in questions for name in (question.category, question.kind))
    if unknown := [name for name in wanted if name not in known]:
        raise InputError(f"there is no category {unknown[0]!r}; these questions have {', '.join(known)}")
    groups: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        if not wanted or {question.category, question.kind} & set(wanted):
            groups[question.category].append(question)
    taken = {question.id for group in groups.values() for question in group[:count]}
    return [question for question in questions if question.id in taken]


def digest(questions: Sequence[Question]) -> str:
    """Hexadecimal digest of a set of questions."""
    text = json.dumps([[q.id, q.category, q.turns] for q in questions])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


FORMAT = "sakiyomi bench spec 1"
PLAIN = "none"
RUNS = "laps"
"""What files of this format call the runs of a record."""
RunCounts = Mapping[str, float]
"""tokens, seconds and prefill_seconds of one answer to all turns; rounds, committed, drafted and accepted."""


@dataclass(frozen=True)
class Record:
    """The result of one drafter on one question.

    Attributes:
        question: its id.
        category: the column of the tables that it counts for.
        draft: spec of the drafter; "none": plain decoding.
        runs: measured runs of the drafter.
        plain: runs of plain decoding; each was interleaved with the drafter's run of the same index.
        equal: all answers equal the plain ones, to the last token.
        explained: they are equal, or differ only at a near-tie that rounding decides.
        note: where and by how much they differ.
        answers: texts of the plain answers; in the record of plain decoding only.
    """

    question: int | str
    category: str
    draft: str
    runs: tuple[RunCounts, ...]
    plain: tuple[RunCounts, ...]
    equal: bool
    explained: bool
    note: str = ""
    answers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int | str, str]:
        """Question and drafter."""
        return self.question, self.draft

    def to_dict(self) -> dict[str, Any]:
        """JSON values; empty ones are left out."""
        found = {name: value for name, value in vars(self).items() if value not in ("", ())}
        return {RUNS if name == "runs" else name: value for name, value in found.items()}

    @classmethod
    def of(cls, value: Any) -> Record:
        """From such values.

        Raises:
            TypeError, KeyError, ValueError: they are no record's.
        """
        found = {**value}
        record = cls(runs=found.pop(RUNS), **found)
        runs, plain = tuple(record.runs), tuple(record.plain)
        if not runs or len(runs) != len(plain) or not all(run["seconds"] > 0 for run in (*runs, *plain)):
            raise ValueError(RUNS)
        return replace(record, runs=runs, plain=plain, answers=tuple(record.answers))


@dataclass
class Results:
    """Records that were made with the same settings.

    Attributes:
        settings: must be equal in results that are joined.
        conditions: of the run that began the file.
        records: by question and drafter.
        path: file that new records are written to; None: they are not kept.
        notes: why some drafters are missing; not in the file.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    records: dict[tuple[int | str, str], Record] = field(default_factory=dict)
    path: Path | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | Path) -> Results:
        """Read a file of results. An incomplete last line is ignored.

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
            found.records[record.key] = record
        return found

    @classmethod
    def kept(cls, path: str | Path | None) -> Results:
        """Read a file of results that may not exist yet; it is then empty.

        Raises:
            LoadError: it cannot be read, or holds something else; or there is no folder for it.
        """
        if path is None:
            return cls()
        place = Path(path).expanduser()
        if not place.parent.is_dir():
            raise LoadError(f"cannot write {str(place)!r} (there is no such folder); choose another --out")
        empty = not place.exists() or (place.is_file() and not place.stat().st_size)
        return cls(path=place) if empty else cls.read(place)

    def add(self, more: Results, where: str = "now") -> None:
        """Add results of the same settings; the file is rewritten atomically.

        Args:
            more: the results; they replace records of the same question and drafter.
            where: names them in an error.

        Raises:
            InputError: names the first settings that differ.
            LoadError: the file cannot be written.
        """
        if not self.settings:
            self.settings, self.conditions = more.settings, more.conditions
        if apart := differences(self.settings, more.settings):
            said = "; ".join(f"{name} {old!r:.60}, {where} {new!r:.60}" for name, (old, new) in list(apart.items())[:3])
            raise InputError(
                f"results of other settings or another machine cannot be joined ({said}); use the same settings and "
                "equal machines, or name another file"
            )
        self.records |= more.records
        self.notes = more.notes
        if self.path is not None:
            self.write()

    def write(self) -> None:
        """Write the whole file anew.

        Raises:
            LoadError: it cannot be written.
        """
        assert self.path is not None
        head = {"format": FORMAT, "settings": dict(self.settings), "conditions": dict(self.conditions)}
        with whole_file(self.path, "choose another --out") as fresh:
            lines = [head, *(record.to_dict() for record in self.records.values())]
            fresh.write_text("".join(map(line, lines)), encoding="utf-8")


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, with both values."""
    names = dict.fromkeys([*one, *other])
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def join(several: Sequence[Results]) -> Results:
    """All results in one; the last record of a question and drafter is used.

    Raises:
        InputError: they were made with other settings, or there is none.
    """
    if not several:
        raise InputError("no file was given; name one or more that bench spec has made")
    joined = Results()
    for results in several:
        joined.add(results, f"in {str(results.path)!r}")
    return joined
