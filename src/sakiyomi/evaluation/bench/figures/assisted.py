"""Figures of the article on assisted generation: an assistant that knows the answer, batches, tasks and weights."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import LoadError, SakiyomiError
from sakiyomi.core.prompts import read_text
from sakiyomi.evaluation.bench.drafts import oracle as oracle_row
from sakiyomi.evaluation.bench.draw import curve, plain_numbers
from sakiyomi.evaluation.bench.figures.races import RACED
from sakiyomi.evaluation.bench.figures.section import Section, Theme, legend_below, stacked
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.speed import sweep
from sakiyomi.evaluation.bench.tasks.config import KINDS, TasksConfig
from sakiyomi.evaluation.bench.tasks.plot import bars
from sakiyomi.evaluation.bench.tasks.run import run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BATCH", "ORACLE", "TASKS"]

SHORT = 48  # new tokens where up to 64 texts are written at once, or by twenty ways, so that the figures take minutes


def oracle(work: Work) -> Row:
    """A draft of known rate at no cost."""
    return oracle_row(work.row("oracle"))


def _paint_oracle(row: Row, theme: Theme) -> Figure:
    figure, (upper, lower) = stacked(2)
    known = [line for line in row.lines if line["rate"] == 1.0]
    known.sort(key=lambda line: line["gamma"])
    curve(upper, known, "gamma", "passes", "o-", label="passes of the target, all texts", color=theme.colours[0])
    curve(upper, known, "gamma", "least", "s-", label="as few as there can be", color=theme.colours[1])
    upper.set(xlabel="draft tokens a round, all right", ylabel="passes")
    upper.legend()
    rates = sorted((line for line in row.lines if line["gamma"] == row.lines[0]["gamma"]), key=lambda one: one["rate"])
    curve(lower, rates, "rate", "ratio", "o-", label="speed over plain", color=theme.colours[0])
    curve(lower, rates, "rate", "expected", "s-", label="tokens a pass, by theory", color=theme.colours[1])
    lower.set(xlabel="share of draft tokens that are right", ylabel="times")
    lower.legend()
    return figure


def _alt_oracle(row: Row) -> str:
    said = [f"gamma {line['gamma']}: {line['passes']} passes" for line in row.lines if line["rate"] == 1.0]
    return f"With an assistant that is always right and costs nothing, all texts take: {', '.join(said)}."


ORACLE = Section(
    "An assistant that knows the answer",
    "The number of passes falls with the length of the draft, down to one a text: O(1) in place of O(n). Below, what "
    "is left of it where the assistant is wrong at times.",
    oracle,
    _paint_oracle,
    _alt_oracle,
)


def batch(work: Work) -> Row:
    """Requests at once, 1 to 64, plain and speculative."""
    tokens = min(SHORT, work.config.max_new_tokens)
    return replace(sweep(work.row("batch", max_new_tokens=tokens)), name="batch")


def _paint_batch(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked(1)
    for way, colour, mark in (("plain", theme.colours[0], "o"), ("speculative", theme.colours[1], "s")):
        curve(axes, row.lines, "batch", f"{way}_tokens_per_second", mark + "-", label=way, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="tokens/s of all of them")
    axes.set_xticks([line["batch"] for line in row.lines], [str(line["batch"]) for line in row.lines])
    plain_numbers(axes)
    axes.legend()
    return figure


def _alt_batch(row: Row) -> str:
    first, last = row.lines[0], row.lines[-1]
    grown = last["plain_tokens_per_second"] / first["plain_tokens_per_second"]
    return f"{last['batch']} requests at once have {grown:.1f} times the tokens per second of {first['batch']}, plain."


BATCH = Section(
    "Requests at once",
    "Weights that are read once serve every request of a batch, so that tokens per second grow with it; a draft uses "
    "the same rows, and pays for small batches.",
    batch,
    _paint_batch,
    _alt_batch,
)


def tasks(work: Work) -> Row:
    """Of files that ``bench tasks --json`` wrote, or the report's own pair on its prompts."""
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    for row in _given(work) if work.config.tasks else _own(work):
        if row["error"] is not None:
            raise SakiyomiError(row["error"])
        lines += [{"task": row["row"], **line} for line in row["lines"]]
        notes += [f"{row['row']}: {note}" for note in row["notes"]]
    return Row("tasks", "seconds an answer by task and by how the weights lie", lines, {}, notes)


def _given(work: Work) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in work.config.tasks:
        try:
            rows = json.loads(read_text(Path(path)).strip().splitlines()[-1])["rows"]
            found += [row for row in rows if row["row"] in KINDS]
        except (ValueError, KeyError, TypeError, IndexError):
            raise LoadError(
                f"tasks is {path!r}, which does not end with the JSON line of `sakiyomi bench tasks --json`"
            ) from None
    return found


def _own(work: Work) -> list[dict[str, Any]]:
    config = work.config
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        texts = work.pair.config.texts()[:RACED]
        file.write_text("".join(json.dumps({"source": text}) + "\n" for text in texts), encoding="utf-8")
        asked = TasksConfig(
            data=(f"chat={file}",), target=config.target, draft=config.draft, device=config.device, gamma=config.gamma,
            repeats=config.repeats, max_new_tokens=min(SHORT, config.max_new_tokens), count=config.count,
        )  # fmt: skip
        return [row.to_dict() for row in run(asked, work.note)]


def _paint_tasks(row: Row, theme: Theme) -> Figure:
    names = list(dict.fromkeys(line["task"] for line in row.lines))
    figure, several = stacked(len(names), 3.4)
    for axes, name in zip(several, names, strict=True):
        bars(axes, Row(name, "", [line for line in row.lines if line["task"] == name]), theme.colours)
    legend_below(figure, several[0])
    return figure


def _alt_tasks(row: Row) -> str:
    best = [line for line in row.lines if line["over_assisted"]]
    said = [
        f"{line['task']}, {line['way']}, {line['name']}: {line['over_assisted']:.1f} times transformers' assisted"
        for line in best
        if line["name"].startswith("sakiyomi")
    ]
    return f"Bars of seconds an answer. {'; '.join(said) or 'transformers was not measured'}."


TASKS = Section(
    "Time an answer, by task and by how the weights lie",
    "Speech, summaries, translation, code, chat, in float32, bfloat16, 8 bits and with the weights on the disk. With "
    "`--tasks` from the files of `sakiyomi bench tasks --json`; else this pair goes on with the report's own prompts.",
    tasks,
    _paint_tasks,
    _alt_tasks,
    ("tasks",),
)
