"""Figures of two commands of their own: accuracy by memory (``bench long``), predictions (``tune --all``)."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.evaluation.bench.draw import curve
from sakiyomi.evaluation.bench.figures.section import Section, Theme, legend_below, stacked
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.plot import accuracy
from sakiyomi.evaluation.bench.long.run import run
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.tuning.config import PairConfig
from sakiyomi.evaluation.tuning.search import tune

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MEMORY", "PREDICTED"]

MARKS = "osD^vPX"
TEXTS = 4  # prompts for each of the others': half of them compare, and texts differ more than laps


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
    row = next(iter(run(asked, work.note)))
    if row.error is not None:
        raise SakiyomiError(row.error)
    return Row("memory", row.title, row.lines, dict(row.conditions), row.notes)


def _paint_memory(row: Row, theme: Theme) -> Figure:
    figure = accuracy(row, theme.colours, stacked=True)
    if figure is None:
        raise InputError("no system answered; nothing can be drawn")
    return figure


def _alt_memory(row: Row) -> str:
    longest = max(line["length"] for line in row.lines)
    said = [
        f"{line['name']}{f' {line_budget}' if (line_budget := line.get('budget')) else ''} "
        f"{100 * line['accuracy']:.0f} % with {line['kv_bytes'] / 1e6:.2g} MB"
        for line in row.lines
        if line["length"] == longest and line.get("accuracy") is not None
    ]
    return f"Right answers against memory of keys and values, of prompts of {longest} tokens: {'; '.join(said)}."


MEMORY = Section(
    "Accuracy against memory of the cache",
    "Questions whose answer stands somewhere in a long prompt, answered by several cache systems at several budgets. "
    "`sakiyomi bench long` measures more of this: other tasks, peak memory, growth, books, conversations.",
    memory,
    _paint_memory,
    _alt_memory,
    ("memory_target", "memory_lengths"),
)


def predicted(work: Work) -> Row:
    """Every configuration of tune, predicted on one half of the prompts and measured on the other."""
    config = work.config
    if config.predictions is not None:
        found = _read(config.predictions)
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


def _read(name: str) -> dict[str, Any]:
    """What the command printed: its last line, or a file with that alone.

    Raises:
        LoadError: it is something else.
    """
    try:
        found: dict[str, Any] = json.loads(Path(name).expanduser().read_text(encoding="utf-8").strip().splitlines()[-1])
        found["table"], found["conditions"], found["A/A"][1]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise LoadError(
            f"predictions {name} cannot be read ({error!r}); give what `sakiyomi tune --all --json` printed"
        ) from None
    return found


def _paint_predicted(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked(height=5.2)
    drafts = list(dict.fromkeys(line["draft"] for line in row.lines))
    for at, draft in enumerate(drafts):
        own = [line for line in row.lines if line["draft"] == draft]
        look = {"color": theme.colours[at % len(theme.colours)], "markersize": 6, "label": draft}
        curve(axes, own, "measured_speedup", "predicted_speedup", MARKS[at % len(MARKS)], **look)
    ends = [line[key] for line in row.lines for key in ("measured_speedup", "predicted_speedup")]
    low, high = 0.95 * min(ends), 1.05 * max(ends)
    axes.plot([low, high], [low, high], color=theme.faint, linewidth=1)
    axes.fill_between([low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high], color=theme.faint, alpha=0.25)
    axes.set(xlabel="measured speed-up", ylabel="predicted speed-up; band: 5 % off", xlim=(low, high), ylim=(low, high))
    legend_below(figure, axes)
    return figure


def _alt_predicted(row: Row) -> str:
    errors = [abs(line["error"]) for line in row.lines]
    return (
        f"Predicted against measured speed-up of {len(row.lines)} configurations, along the diagonal: off by "
        f"{100 * statistics.median(errors):.1f} % in the median and {100 * max(errors):.0f} % at worst."
    )


PREDICTED = Section(
    "Predicted against measured speed-up",
    "Every drafter and length of `sakiyomi tune --all`: predicted from rounds on one half of the prompts, then "
    "measured on the other half. On the diagonal a prediction is right.",
    predicted,
    _paint_predicted,
    _alt_predicted,
    ("predictions",),
)
