"""Figures of what other commands measure: ``bench``, ``bench tasks``, ``bench long``, ``bench locret``, ``tune``."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.drafts import oracle as oracle_row
from sakiyomi.evaluation.bench.figures.speeds import RACED
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.long.config import LocretConfig, LongConfig
from sakiyomi.evaluation.bench.long.locret import run as run_locret
from sakiyomi.evaluation.bench.long.plot import accuracy
from sakiyomi.evaluation.bench.long.questions import source
from sakiyomi.evaluation.bench.long.run import run as run_long
from sakiyomi.evaluation.bench.long.systems import Ours
from sakiyomi.evaluation.bench.pictures import Figures, Panel, Theme, curves, grouped, stack
from sakiyomi.evaluation.bench.plot import BY_BATCH, ORACLE
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.speed import sweep
from sakiyomi.evaluation.bench.tasks.config import KINDS, TasksConfig
from sakiyomi.evaluation.bench.tasks.run import run as run_tasks
from sakiyomi.evaluation.bench.tasks.run import seconds
from sakiyomi.evaluation.tuning.config import PairConfig
from sakiyomi.evaluation.tuning.search import tune

SHORT = 48  # new tokens where up to 64 texts are written at once, or by twenty ways, so that the figures take minutes
TEXTS = 4  # prompts for each of the others': half of them compare, and texts differ more than laps
CELLS = 64
"""Pieces of a text, each with the share of its pairs that stayed."""
CHUNK = 256


def _whole(rows: dict[str, Row], name: str) -> Row:
    """The row of a command that has not failed.

    Raises:
        SakiyomiError: it has.
    """
    if (error := rows[name].error) is not None:
        raise SakiyomiError(error)
    return rows[name]


def _last_line(name: str, given: str, command: str) -> Any:
    """What a command printed as JSON: the last line of a file.

    Args:
        name: of the setting.
        given: the file.
        command: that prints it.

    Raises:
        LoadError: there is no such line.
    """
    try:
        return json.loads(Path(given).expanduser().read_text(encoding="utf-8").strip().splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise LoadError(f"{name} {given} cannot be read ({error!r}); give what `sakiyomi {command}` printed") from None


def batch(work: Work) -> Row:
    """Requests at once, 1 to 64, plain and speculative."""
    tokens = min(SHORT, work.config.max_new_tokens)
    return replace(sweep(work.row("batch", max_new_tokens=tokens)), name="batch")


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
    command = "bench tasks --json"
    try:
        files = [_last_line("tasks", path, command)["rows"] for path in work.config.tasks]
        return [row for rows in files for row in rows if row["row"] in KINDS]
    except (KeyError, TypeError):
        raise LoadError(f"a file of tasks does not end with the JSON line of `sakiyomi {command}`") from None


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
        return [row.to_dict() for row in run_tasks(asked, work.note)]


def _paint_tasks(row: Row, theme: Theme) -> Any:
    names = dict.fromkeys(line["task"] for line in row.lines)
    return stack(*map(_panel_task, names), height=3.4, below=True)(row, theme)


def _panel_task(name: str) -> Panel:
    def panel(axes: Any, row: Row, theme: Theme) -> None:
        seconds(axes, Row(name, "", [line for line in row.lines if line["task"] == name]), theme)

    return panel


def memory(work: Work) -> Row:
    """Right answers of some cache systems, by the bytes that they hold."""
    config = work.config
    asked = LongConfig(
        target=config.memory_target,
        systems=("full", "h2o", "snapkv", "streaming", "quant-4"),
        budgets=("1/8", "1/4"),
        lengths=config.memory_lengths,
        count=config.count,
        seeds=("0", "1"),
        # Between chunks a budget is exceeded by one: with a large one short prompts would never meet it.
        chunk_size=128,
        memory=False,
        dtype=config.dtype,
        device=config.device,
    )
    row = _whole({row.name: row for row in run_long(asked, work.note)}, "long")
    return replace(row, name="memory")


def _paint_memory(row: Row, theme: Theme) -> Any:
    if not (panels := accuracy(row)):
        raise InputError("no system answered; nothing can be drawn")
    return stack(*panels, height=3.4, below=True)(row, theme)


def _named(line: Any) -> str:
    return " ".join(filter(None, (line["name"], line.get("budget"))))


def _held(line: Any) -> str:
    return f"{line['accuracy']:.0%} with {line['kv_bytes'] / 1e6:.2g} MB"


def _asked(work: Work) -> LocretConfig:
    config = work.config
    lengths = config.memory_lengths[-1:]
    return LocretConfig(
        target=config.memory_target, lengths=lengths, count=max(1, config.count // 2), seeds=("0",), chunk_size=CHUNK,
        memory=False, dtype=config.dtype, device=config.device,
    )  # fmt: skip


def locret(work: Work) -> Row:
    """The article's systems, as published, on one length."""
    rows = {row.name: row for row in run_locret(_asked(work), work.note)}
    whole = _whole(rows, "long")
    return replace(rows["systems"], name="locret", conditions=dict(whole.conditions), notes=whole.notes)


def _panel_systems(key: str, scale: float, label: str, colour: int) -> Panel:
    def panel(axes: Any, row: Row, theme: Theme) -> None:
        values = [scale * (line[key] or 0) for line in row.lines]
        names = [line["name"] for line in row.lines]
        (places,) = grouped(axes, names, {"": values}, theme.colours[colour:])
        axes.tick_params(axis="x", rotation=20)
        axes.set(ylabel=label)
        for x, line in zip(places, row.lines, strict=True):
            axes.text(x, 0, line["state"], ha="center", va="bottom", fontsize=8)

    return panel


def kept(work: Work) -> Row:
    """Of one question's text the share of pairs that each layer and head still holds, piece by piece."""
    asked = _asked(work)
    length = int(asked.lengths[0])
    budget = max(1, length // 8)
    llm = LLM(
        asked.target, "none", cache=asked.systems()["Locret"], kv_budget=budget, chunk_size=CHUNK, dtype=asked.dtype,
        device=asked.device, max_batch=1,
    )  # fmt: skip
    question = source(asked.long(), llm.tokenizer)(length)[0]
    work.note(f"kept: a question of {len(question.tokens)} tokens")
    places = Ours(llm).answer(question.tokens, 1, kept=True).kept or []
    edges = np.linspace(0, len(question.tokens), CELLS + 1)
    lines: list[dict[str, Any]] = [
        {"layer": layer, "head": head, "kept": (np.histogram(own, edges)[0] / np.diff(edges)).round(3).tolist()}
        for layer, heads in enumerate(places)
        for head, own in enumerate(heads)
    ]
    spans = [[begin / len(question.tokens), end / len(question.tokens)] for begin, end in question.spans]
    conditions = {"target": asked.target, "tokens": len(question.tokens), "budget": budget, "answer": str(spans)}
    return Row("kept", "share of pairs kept, by layer, head and place in the text", lines, conditions)


def _panel_kept(axes: Any, row: Row, theme: Theme) -> None:
    table = np.array([line["kept"] for line in row.lines])
    axes.imshow(table, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=(0, 100, len(table) - 0.5, -0.5))
    axes.set_yticks(range(len(table)), [f"{line['layer']}.{line['head']}" for line in row.lines], fontsize=7)
    axes.set(xlabel="place in the text, %", ylabel="layer.head")
    axes.grid(visible=False)
    for begin, end in _spans(row):
        axes.axvspan(100 * begin, 100 * end + 0.3, color=theme.colours[1], alpha=0.8)


def _spans(row: Row) -> list[list[float]]:
    """Where the answer stands, as shares of the text."""
    found: list[list[float]] = json.loads(row.conditions["answer"])
    return found


def predicted(work: Work) -> Row:
    """Every configuration of tune, predicted on one half of the prompts and measured on the other."""
    config = work.config
    if config.predictions is not None:
        found = _predictions(config.predictions)
    else:
        asked = PairConfig(
            target=config.target,
            draft=() if config.draft == "auto" else (config.draft,),
            prompts=config.prompts,
            count=max(2, TEXTS * config.count),
            prompt_tokens=config.prompt_tokens,
            max_new_tokens=max(8, config.max_new_tokens),
            all=True,
            dtype=config.dtype,
            device=config.device,
            save=False,
        )
        found = tune(asked, lambda text: work.note(f"predicted: {text}"))
    names = ("draft", "gamma", "predicted_speedup", "measured_speedup", "error")
    lines = [
        {name: line[name] for name in names}
        for line in found["table"]
        if line["draft"] != "none" and "measured_speedup" in line
    ]
    if not lines:
        raise InputError("no configuration was both predicted and measured; run tune with --all")
    errors = [abs(line["error"]) for line in lines]
    conditions = dict(found["conditions"]) | {"A/A": "{:.3f} to {:.3f}".format(*found["A/A"])}
    conditions |= {"median_error": statistics.median(errors), "worst_error": max(errors)}
    return Row("predicted", "speed-up over plain, predicted and measured", lines, conditions)


def _predictions(name: str) -> dict[str, Any]:
    """What the command printed.

    Raises:
        LoadError: it is something else.
    """
    found = _last_line("predictions", name, "tune --all --json")
    try:
        found["table"], found["conditions"], found["A/A"][1]
    except (KeyError, IndexError, TypeError) as error:
        raise LoadError(f"predictions {name} has no {error}; give what `sakiyomi tune --all --json` printed") from None
    return dict(found)


def _panel_predicted(axes: Any, row: Row, theme: Theme) -> None:
    look: dict[str, Any] = {"xlabel": "measured speed-up", "ylabel": "predicted speed-up; band: 5 % off"}
    points = curves("measured_speedup", {"predicted_speedup": ""}, by="draft", stroke="", **look)
    points(axes, row, theme)
    ends = [line[key] for line in row.lines for key in ("measured_speedup", "predicted_speedup")]
    low, high = 0.95 * min(ends), 1.05 * max(ends)
    axes.plot([low, high], [low, high], color=theme.faint, linewidth=1)
    axes.fill_between([low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high], color=theme.faint, alpha=0.25)
    axes.set(xlim=(low, high), ylim=(low, high))


FIGURES: Figures = {
    "oracle": (lambda work: oracle_row(work.row("oracle")), stack(*ORACLE[:2])),
    "batch": (batch, stack(BY_BATCH[0])),
    "tasks": (tasks, _paint_tasks),
    "memory": (memory, _paint_memory),
    "locret": (
        locret,
        stack(
            _panel_systems("accuracy", 100, "right answers, %", 0),
            _panel_systems("kv_bytes", 1e-6, "keys and values, MB", 1),
        ),
    ),
    "kept": (kept, stack(_panel_kept, height=lambda row: 1.6 + 0.2 * len(row.lines))),
    "predicted": (predicted, stack(_panel_predicted, height=5.2, below=True)),
}
