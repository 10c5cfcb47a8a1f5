"""Figures of the article on Locret: right answers by memory for its systems, and what was kept of one question."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from sakiyomi.core.errors import SakiyomiError
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.figures.section import Section, Theme, stacked
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.locret.config import LocretConfig
from sakiyomi.evaluation.bench.locret.run import SYSTEMS, run
from sakiyomi.evaluation.bench.long.questions import source
from sakiyomi.evaluation.bench.long.systems import Ours
from sakiyomi.evaluation.bench.report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["KEPT", "LOCRET"]

CELLS = 64
"""Pieces of the text, each with the share of its pairs that stayed."""
CHUNK = 256


def _asked(work: Work) -> LocretConfig:
    config = work.config
    lengths = config.memory_lengths[-1:]
    return LocretConfig(
        target=config.memory_target, lengths=lengths, count=max(1, config.count // 2), seeds=("0",), chunk_size=CHUNK,
        memory=False, dtype=config.dtype, device=config.device,
    )  # fmt: skip


def locret(work: Work) -> Row:
    """The article's systems, as published, on one length."""
    rows = {row.name: row for row in run(_asked(work), work.note)}
    if (error := rows["long"].error) is not None:
        raise SakiyomiError(error)
    found = rows["systems"]
    return Row("locret", found.title, found.lines, dict(rows["long"].conditions), rows["long"].notes)


def _paint_locret(row: Row, theme: Theme) -> Figure:
    figure, (upper, lower) = stacked(2)
    names = [line["name"] for line in row.lines]
    for axes, values, label, colour in (
        (upper, [100 * (line["accuracy"] or 0) for line in row.lines], "right answers, %", theme.colours[0]),
        (lower, [(line["kv_bytes"] or 0) / 1e6 for line in row.lines], "keys and values, MB", theme.colours[1]),
    ):
        axes.bar(range(len(names)), values, color=colour)
        axes.set_xticks(range(len(names)), names, rotation=20)
        axes.set(ylabel=label)
        for place, line in enumerate(row.lines):
            if line["state"]:
                axes.text(place, 0, line["state"], ha="center", va="bottom", fontsize=8)
    return figure


def _alt_locret(row: Row) -> str:
    said = [
        f"{line['name']} {100 * line['accuracy']:.0f} % with {line['kv_bytes'] / 1e6:.2g} MB"
        if line["accuracy"] is not None
        else f"{line['name']} {line['state']}"
        for line in row.lines
    ]
    return f"Right answers and bytes of keys and values: {', '.join(said)}."


LOCRET = Section(
    "Memory and score by system",
    f"{', '.join(SYSTEMS)}, each as published, an eighth of the context where there is a budget (`sakiyomi bench "
    "locret` has all tables).",
    locret,
    _paint_locret,
    _alt_locret,
    ("memory_target", "memory_lengths"),
)


def kept(work: Work) -> Row:
    """Of one question's text the share of pairs that each layer and head still holds, piece by piece."""
    asked = _asked(work)
    length = int(asked.lengths[0])
    budget = max(1, length // 8)
    llm = LLM(
        asked.target, "none", cache=asked.systems()["Locret"], kv_budget=budget, chunk_size=CHUNK, dtype=asked.dtype,
        device=asked.device, max_batch=1,
    )  # fmt: skip
    question = source(asked.long(), llm.tokenizer).questions(length)[0]
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


def _paint_kept(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked(1, 1.6 + 0.2 * len(row.lines))
    table = np.array([line["kept"] for line in row.lines])
    axes.imshow(table, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=(0, 100, len(table) - 0.5, -0.5))
    axes.set_yticks(range(len(table)), [f"{line['layer']}.{line['head']}" for line in row.lines], fontsize=7)
    axes.set(xlabel="place in the text, %", ylabel="layer.head")
    axes.grid(visible=False)
    for begin, end in _spans(row):
        axes.axvspan(100 * begin, 100 * end + 0.3, color=theme.colours[1], alpha=0.8)
    return figure


def _spans(row: Row) -> list[list[float]]:
    """Where the answer stands, as shares of the text."""
    found: list[list[float]] = json.loads(row.conditions["answer"])
    return found


def _alt_kept(row: Row) -> str:
    cells = [int(begin * CELLS) for begin, _ in _spans(row)]
    held = [max(line["kept"][cell] for line in row.lines) for cell in cells]
    where = f"; where the answer stands the fullest head holds {100 * max(held):.0f} %" if held else ""
    return f"A row for each of {len(row.lines)} heads, dark where pairs stayed{where}."


KEPT = Section(
    "What was kept of one question",
    "Retaining heads score every pair once; of an eighth that stays, each head keeps other places. The answer stands "
    "where the coloured line is.",
    kept,
    _paint_kept,
    _alt_kept,
    ("memory_target", "memory_lengths"),
)
