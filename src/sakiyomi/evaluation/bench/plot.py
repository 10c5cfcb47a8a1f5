"""The rows of a benchmark as a picture: bars for a race, curves for the sweep. Needs matplotlib; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.draw import (
    BAR,
    BASELINE,
    COLOURS,
    FOOT,
    MARK,
    WIDTH,
    blank,
    bordered,
    curve,
    foot,
    need_matplotlib,
    save,
    small,
)
from sakiyomi.evaluation.bench.report import Row

__all__ = ["check", "draw"]

SUFFIXES = (".png", ".svg")
WHISKER = "#222222"
WAYS = {"plain": COLOURS[1], "speculative": BAR}


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
    """Draw the rows that have something to draw, one below the other; conditions of all of them stand at the top.

    Returns:
        False where none has; nothing is written then.

    Raises:
        LoadError: the file cannot be written.
    """
    drawn = [(row, painter) for row in rows if (painter := _painter(row)) is not None]
    if not drawn:
        return False
    heights = [_height(row) for row, _ in drawn]
    figure = blank(WIDTH, sum(heights) + 0.3)
    figure.suptitle(small(conditions), **FOOT)
    parts = figure.subfigures(len(drawn), 1, height_ratios=heights, squeeze=False)
    for part, (row, painter) in zip(parts[:, 0], drawn, strict=True):
        part.suptitle(f"{row.name}: {row.title}", fontsize=11)
        painter(part, row)
        foot(part, row.conditions)
    save(figure, path)
    return True


def _painter(row: Row) -> Callable[[Any, Row], None] | None:
    if any(line.get("plain_tokens_per_second") for line in row.lines):
        return _curves
    if any(line.get("oracle_tokens_per_second") for line in row.lines):
        return _points
    return _bars if any(line.get("tokens_per_second") for line in row.lines) else None


def _height(row: Row) -> float:
    """Inches."""
    return 4.2 if _painter(row) in (_curves, _points) else 1.5 + 0.42 * len(row.lines)


def _bars(part: Any, row: Row) -> None:
    """A bar for each contender, with the lowest and highest lap; the baseline is the first."""
    axes = part.subplots()
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
    # From top to bottom, also where the last one has no bar; room for the labels behind the longest.
    axes.set(
        ylim=(len(row.lines) - 0.5, -0.5),
        xlim=(0, 1.35 * most),
        xlabel="tokens/s, median of laps; lines: lowest and highest lap",
    )
    axes.spines[["top", "right"]].set_visible(False)


def _label(line: Mapping[str, Any], *, first: bool) -> str:
    place = "baseline" if first else f"{line['ratio']:.2f}x"
    return f"{line['tokens_per_second']:.0f}, {place}" + (", other weights" if line.get("weights") else "")


def _curves(part: Any, row: Row) -> None:
    """Throughput and latency against requests at once, plain and speculative; where it does not pay is marked."""
    throughput, latency = bordered(part.subplots(1, 2))
    sizes = [line["batch"] for line in row.lines]
    for way, colour in WAYS.items():
        lines = [line for line in row.lines if line[f"{way}_tokens_per_second"] is not None]
        look: dict[str, Any] = {"color": colour, "markersize": 4, "label": way}
        curve(throughput, lines, "batch", f"{way}_tokens_per_second", **look)
        xs, lows, highs = ([line[name] for line in lines] for name in ("batch", f"{way}_low", f"{way}_high"))
        throughput.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
        curve(latency, lines, "batch", f"{way}_latency_seconds", **look)
    for axes in (throughput, latency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        for line in row.lines:
            if line["stops"]:
                axes.axvline(line["batch"], color=MARK, linestyle="--", linewidth=1, label="speculative slower")
    throughput.set(ylabel="tokens/s of all requests", xlabel="requests at once")
    latency.set(ylabel="seconds a request, median", xlabel="requests at once")
    throughput.legend(frameon=False, fontsize=9)


def _points(part: Any, row: Row) -> None:
    """Tokens a pass and speed-up by rate, beside the theory; at rate 1 passes by gamma, beside the fewest possible."""
    tokens, speed, passes = bordered(part.subplots(1, 3))
    rates = [line for line in row.lines if line["gamma"] == row.lines[0]["gamma"]]
    curve(tokens, rates, "rate", "expected", "-", color=BASELINE, label="theory")
    curve(tokens, rates, "rate", "tau", "o", color=BAR, markersize=5, label="measured")
    curve(speed, rates, "rate", "expected", "-", color=BASELINE, label="passes cost alike")
    curve(speed, rates, "rate", "predicted", "--", color=WAYS["plain"], label="with the passes' costs")
    curve(speed, rates, "rate", "ratio", "o", color=BAR, label="measured")
    sure = sorted((line for line in row.lines if line["rate"] == 1.0), key=lambda line: line["gamma"])
    curve(passes, sure, "gamma", "least", "-", color=BASELINE, label="fewest possible")
    curve(passes, sure, "gamma", "passes", "o", color=BAR, label="measured")
    tokens.set(ylabel="tokens a pass", xlabel=f"rate, gamma {row.lines[0]['gamma']}")
    speed.set(ylabel="speed-up over plain", xlabel="rate")
    passes.set(ylabel="passes, rate 1", xlabel="gamma")
    for axes in (tokens, speed, passes):
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
