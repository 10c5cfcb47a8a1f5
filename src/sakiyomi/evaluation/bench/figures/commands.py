"""Figures of what other commands measure: ``bench``, ``bench tasks``, ``bench long``, ``bench locret``, ``tune``."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.core.prompts import text_of
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.drafts import oracle as oracle_row
from sakiyomi.evaluation.bench.figures.config import ReportConfig
from sakiyomi.evaluation.bench.figures.speeds import RACED
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.long.config import LocretConfig, LongConfig
from sakiyomi.evaluation.bench.long.locret import run as run_locret
from sakiyomi.evaluation.bench.long.questions import source
from sakiyomi.evaluation.bench.long.run import run as run_long
from sakiyomi.evaluation.bench.long.systems import Ours
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.speed import sweep
from sakiyomi.evaluation.bench.tasks.config import KINDS, TasksConfig
from sakiyomi.evaluation.bench.tasks.run import run as run_tasks
from sakiyomi.evaluation.tuning.config import PairConfig
from sakiyomi.evaluation.tuning.search import tune

SHORT = 48  # new tokens where up to 64 texts are written at once, or by twenty ways, so that the figures take minutes
TEXTS = 4  # prompts for each of the others': half of them compare, and texts differ more than runs
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


def _same(config: Any, *names: str) -> dict[str, Any]:
    """Settings that another command has under the same names."""
    return {name: getattr(config, name) for name in names}


def oracle(work: Work) -> Row:
    """A draft of known rate."""
    return oracle_row(work)


def batch(work: Work) -> Row:
    """Requests at once, 1 to 64, plain and speculative."""
    return sweep(work.changed(max_new_tokens=min(SHORT, work.config.max_new_tokens)))


def tasks(work: Work) -> Row:
    """Of files that ``bench tasks --json`` wrote, or the report's own pair on its prompts."""
    lines: list[dict[str, Any]] = []
    for row in _given(work.report.tasks) if work.report.tasks else _own(work):
        if row["error"] is not None:
            raise SakiyomiError(row["error"])
        lines += [{"task": row["row"], **line} for line in row["lines"]]
        work.notes += [f"{row['row']}: {note}" for note in row["notes"]]
    return Row(work.name, "", lines, {}, work.notes)


def _given(paths: Sequence[str]) -> list[dict[str, Any]]:
    command = "bench tasks --json"
    try:
        files = [_last_line("tasks", path, command)["rows"] for path in paths]
        return [row for rows in files for row in rows if row["row"] in KINDS]
    except (KeyError, TypeError):
        raise LoadError(f"a file of tasks does not end with the JSON line of `sakiyomi {command}`") from None


def _own(work: Work) -> list[dict[str, Any]]:
    config = work.config
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        texts = map(text_of, config.texts()[:RACED])
        file.write_text("".join(json.dumps({"source": text}) + "\n" for text in texts), encoding="utf-8")
        shared = _same(config, "target", "draft", "device", "gamma", "repeats", "count")
        asked = TasksConfig(data=(f"chat={file}",), max_new_tokens=min(SHORT, config.max_new_tokens), **shared)
        return [row.to_dict() for row in run_tasks(asked, work.note)]


def memory(work: Work) -> Row:
    """Right answers of some cache systems, by the bytes that they hold."""
    report = work.report
    asked = LongConfig(
        target=report.memory_target,
        systems=("full", "h2o", "snapkv", "streaming", "quant-4"),
        budgets=("1/8", "1/4"),
        lengths=report.memory_lengths,
        seeds=("0", "1"),
        # Between chunks a budget is exceeded by one: with a large one short prompts would never meet it.
        chunk_size=128,
        memory=False,
        **_same(report, "count", "dtype", "device"),
    )
    return replace(_whole({row.name: row for row in run_long(asked, work.note)}, "long"), name=work.name)


def _asked(report: ReportConfig) -> LocretConfig:
    known: dict[str, Any] = {"target": report.memory_target, "lengths": report.memory_lengths[-1:]}
    known |= {"count": max(1, report.count // 2), "seeds": ("0",), "chunk_size": CHUNK, "memory": False}
    return LocretConfig(**known, **_same(report, "dtype", "device"))


def locret(work: Work) -> Row:
    """The article's systems, as published, on one length."""
    rows = {row.name: row for row in run_locret(_asked(work.report), work.note)}
    whole = _whole(rows, "long")
    return replace(rows["systems"], name=work.name, conditions=dict(whole.conditions), notes=whole.notes)


def kept(work: Work) -> Row:
    """Of one question's text the share of pairs that each layer and head still holds, piece by piece."""
    asked = _asked(work.report)
    length = int(asked.lengths[0])
    budget = max(1, length // 8)
    cache: dict[str, Any] = {"cache": asked.systems()["Locret"], "kv_budget": budget, "chunk_size": CHUNK}
    llm = LLM(asked.target, "none", **cache, dtype=asked.dtype, device=asked.device, max_batch=1)
    question = source(asked.long(), llm.tokenizer)(length)[0]
    tokens = len(question.tokens)
    work.note(f"a question of {tokens} tokens")
    places = Ours(llm).answer(question.tokens, 1, kept=True).kept or []
    edges = np.linspace(0, tokens, CELLS + 1)
    lines: list[dict[str, Any]] = [
        {"layer": layer, "head": head, "kept": (np.histogram(own, edges)[0] / np.diff(edges)).round(3).tolist()}
        for layer, heads in enumerate(places)
        for head, own in enumerate(heads)
    ]
    spans = [[begin / tokens, end / tokens] for begin, end in question.spans]
    return Row(work.name, "", lines, {"target": asked.target, "tokens": tokens, "budget": budget, "answer": str(spans)})


def predicted(work: Work) -> Row:
    """Every configuration of tune, predicted on one half of the prompts and measured on the other."""
    report = work.report
    if report.predictions is not None:
        found = _predictions(report.predictions)
    else:
        asked = PairConfig(
            draft=() if report.draft == "auto" else (report.draft,),
            count=max(2, TEXTS * report.count),
            max_new_tokens=max(8, report.max_new_tokens),
            all=True,
            save=False,
            **_same(report, "target", "prompts", "prompt_tokens", "dtype", "device"),
        )
        found = tune(asked, work.note)
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
    return Row(work.name, "", lines, conditions)


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
