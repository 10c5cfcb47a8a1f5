"""The rows of a benchmark as a picture: bars for a race, curves for the sweep. Needs matplotlib; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.draw import BAR, BASELINE, MARK, need_matplotlib, small
from sakiyomi.evaluation.bench.pictures import Lines, Panel, Theme, curves, drawing, over
from sakiyomi.evaluation.bench.report import Row

SUFFIXES = (".png", ".svg")
WHISKER = "#222222"
WAYS = ("plain", "speculative")


def check(path: str) -> None:
    """Refuse before any measuring what could not be drawn after it.

    Raises:
        InputError: the suffix or the folder is wrong.
        UnsupportedError: matplotlib is not installed.
    """
    place = Path(path)
    if place.suffix.lower() not in SUFFIXES:
        raise InputError(f"plot is {path!r}; expected a name that ends in {' or '.join(SUFFIXES)}")
    if place.is_dir() or not place.parent.is_dir() or not os.access(place.parent, os.W_OK):
        raise InputError(f"plot is {path!r}, which cannot be written; name a file in a folder that is there")
    need_matplotlib("plot")


def draw(rows: Sequence[Row], path: str, conditions: Mapping[str, Any]) -> bool:
    """Draw the rows that have something to draw, one below the other; conditions of all of them stand below.

    Returns:
        False where none has; nothing is written then.

    Raises:
        LoadError: the file cannot be written.
    """
    parts = [
        (panel if at else partial(_titled, panel), row, 0.7 + 0.42 * len(row.lines) if panel is _bars else 3.6)
        for row in rows
        for at, panel in enumerate(_panels(row))
    ]
    if parts:
        drawing(path, parts, conditions)
    return bool(parts)


def _titled(panel: Panel, axes: Any, row: Row, theme: Theme) -> None:
    """A row's first panel, below its title and conditions."""
    axes.set_title(f"{row.name}: {row.title}\n{small(row.conditions)}", fontsize=9)
    panel(axes, row, theme)


def _panels(row: Row) -> Sequence[Panel]:
    """Panels of a row, chosen by the figures in its lines; none if there is nothing to draw."""
    known = {name for line in row.lines for name, value in line.items() if value}
    panels: dict[str, Sequence[Panel]] = {
        "plain_latency_seconds": BY_BATCH,
        "oracle_tokens_per_second": ORACLE,
        "tokens_per_second": [_bars],
    }
    return next((found for name, found in panels.items() if name in known), [])


def _bars(axes: Any, row: Row, theme: Theme) -> None:
    """A bar for each contender, with the lowest and highest run; the baseline is the first."""
    most = max(line["high"] or 0 for line in row.lines)
    for place, line in enumerate(row.lines):
        speed = line["tokens_per_second"]
        if speed is None:
            axes.text(0.01 * most, place, "other text than the baseline's: no speed", va="center", fontsize=9)
            continue
        reach = [[speed - line["low"]], [line["high"] - speed]]
        colour = BAR if place else BASELINE
        axes.barh(place, speed, height=0.6, color=colour, xerr=reach, ecolor=WHISKER, capsize=3)
        axes.text(line["high"] + 0.015 * most, place, _label(line, first=not place), va="center", fontsize=9)
    axes.set_yticks(range(len(row.lines)), [line["name"] for line in row.lines])
    # From top to bottom, also where the last one has no bar; room for the labels after the longest.
    axes.set(
        ylim=(len(row.lines) - 0.5, -0.5),
        xlim=(0, 1.35 * most),
        xlabel="tokens/s, median of runs; lines: lowest and highest",
    )
    axes.grid(visible=False)


def _label(line: Mapping[str, Any], *, first: bool) -> str:
    place = "baseline" if first else f"{line['ratio']:.2f}x"
    return f"{line['tokens_per_second']:.0f}, {place}" + (", other weights" if line.get("weights") else "")


def _by_batch(figure: str, label: str, **more: Any) -> Panel:
    """Curves of plain and speculative generation by requests at once; a line where speculation is slower."""

    def stops(axes: Any, row: Row, theme: Theme) -> None:
        for line in row.lines:
            if line["stops"]:
                axes.axvline(line["batch"], color=MARK, linestyle="--", linewidth=1)

    look: dict[str, Any] = {"xscale": "log", "ylim": (0, None), "xlabel": "requests at once", "ylabel": label}
    return over(
        curves("batch", {f"{way}_{figure}": way for way in WAYS}, at="batch", legend="best", **more, **look), stops
    )


BY_BATCH = (
    _by_batch(
        "tokens_per_second",
        "tokens/s of all; dashed: speculative slower",
        band={f"{way}_tokens_per_second": (f"{way}_low", f"{way}_high") for way in WAYS},
    ),
    _by_batch("latency_seconds", "seconds a request, median"),
)
"""Speed and latency by requests at once."""


def _rates(lines: Lines) -> Lines:
    return [line for line in lines if line["gamma"] == lines[0]["gamma"]]


def _sure(lines: Lines) -> Lines:
    return sorted((line for line in lines if line["rate"] == 1.0), key=lambda line: int(line["gamma"]))


_TOKENS = {"tau": ("measured", "o"), "expected": ("theory", "-")}
_SPEEDS = {"ratio": ("measured", "o"), "expected": ("passes cost alike", "-"), "predicted": ("as passes cost", "--")}
_PASSES = {"passes": ("measured", "o"), "least": ("fewest possible", "-")}
_LOOK: dict[str, Any] = {"legend": "best", "ylim": (0, None)}
ORACLE = (
    curves("gamma", _PASSES, of=_sure, xlabel="draft tokens a round, all right", ylabel="passes, all texts", **_LOOK),
    curves("rate", _SPEEDS, of=_rates, xlabel="share of draft tokens that are right", ylabel="speed-up", **_LOOK),
    curves("rate", _TOKENS, of=_rates, xlabel="share of draft tokens that are right", ylabel="tokens a pass", **_LOOK),
)
"""Passes by gamma where all is right; at one gamma speed-up and tokens a pass by rate."""
