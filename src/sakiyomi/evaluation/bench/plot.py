"""The rows of a benchmark as a picture: bars for a race, curves for the sweep. Needs matplotlib; imports no torch."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.draw import BAR, BASELINE, MARK, need_matplotlib, small
from sakiyomi.evaluation.bench.kinds import bars, built
from sakiyomi.evaluation.bench.pictures import Height, Lines, Panel, Theme, curves, drawing
from sakiyomi.evaluation.bench.report import Row

SUFFIXES = (".png", ".svg")
WHISKER = "#222222"


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
        (panel if at else partial(_titled, panel), row, height)
        for row in rows
        for at, (panel, height) in enumerate(_panels(row))
    ]
    if parts:
        drawing(path, parts, conditions)
    return bool(parts)


def _titled(panel: Panel, axes: Any, row: Row, theme: Theme) -> None:
    """A row's first panel, below its title and conditions."""
    axes.set_title(f"{row.name}: {row.title}\n{small(row.conditions)}", fontsize=9)
    panel(axes, row, theme)


@cache
def plots() -> dict[str, Any]:
    """Panels of rows by a figure that such a row has in its lines: ``plots.toml``."""
    return tomllib.loads(Path(__file__).with_name("plots.toml").read_text(encoding="utf-8"))


def _panels(row: Row) -> Sequence[tuple[Panel, Height]]:
    """Panels of a row; none if there is nothing to draw."""
    known = {name for line in row.lines for name, value in line.items() if value}
    declared: Lines = next((panels for name, panels in plots().items() if name in known), [])
    return built(declared, row, KINDS, {})


def _bars(axes: Any, row: Row, theme: Theme) -> None:
    """A bar for each contender, with the lowest and highest run; of a row with several races each has a baseline."""
    most = max(line["high"] or 0 for line in row.lines)
    for place, line in enumerate(row.lines):
        speed = line["tokens_per_second"]
        if speed is None:
            axes.text(0.01 * most, place, "other text than the baseline's: no speed", va="center", fontsize=9)
            continue
        reach = [[speed - line["low"]], [line["high"] - speed]]
        first = line["ratio"] == 1.0  # to itself
        colour = BASELINE if first else BAR
        axes.barh(place, speed, height=0.6, color=colour, xerr=reach, ecolor=WHISKER, capsize=3)
        axes.text(line["high"] + 0.015 * most, place, _label(line, first=first), va="center", fontsize=9)
    axes.set_yticks(range(len(row.lines)), [line["name"] for line in row.lines])
    # From top to bottom, also where the last one has no bar; room for the labels after the longest.
    axes.set(
        ylim=(len(row.lines) - 0.5, -0.5),
        xlim=(0, 1.35 * most),
        xlabel="tokens/s, median of runs; lines: lowest and highest",
    )
    axes.grid(visible=False)


def _by_kind(axes: Any, row: Row, theme: Theme) -> None:
    """Bars of each contender by kind of prompts."""
    speeds = {f"{kind}_tokens_per_second": kind for kind in row.lines[0]["by_category"]}
    bars(speeds, names="{format}, {name}", text="{value:.0f}", xlabel="tokens/s, median of runs")(axes, row, theme)
    axes.legend()


def _label(line: Mapping[str, Any], *, first: bool) -> str:
    place = "baseline" if first else f"{line['ratio']:.2f}x"
    return f"{line['tokens_per_second']:.0f}, {place}" + (", other weights" if line.get("weights") else "")


def _stops(axes: Any, row: Row, theme: Theme) -> None:
    """A line at each size where speculation is slower."""
    for line in row.lines:
        if line["stops"]:
            axes.axvline(line["batch"], color=MARK, linestyle="--", linewidth=1)


def _rates(lines: Lines) -> Lines:
    return [line for line in lines if line["gamma"] == lines[0]["gamma"]]


def _sure(lines: Lines) -> Lines:
    return sorted((line for line in lines if line["rate"] == 1.0), key=lambda line: int(line["gamma"]))


KINDS: dict[str, Callable[..., Panel]] = {
    "race": lambda: _bars,
    "by kind": lambda: _by_kind,
    "stops": lambda: _stops,
    "at one gamma": partial(curves, "rate", of=_rates),
    "all right": partial(curves, "gamma", of=_sure),
}
"""Kinds of panels, see ``kinds.built``."""
