"""The rows of a benchmark as a picture: bars for a race, curves for the sweep. Needs matplotlib; imports no torch."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.evaluation.bench.report import Row, condition_line

__all__ = ["check", "draw", "save"]

SUFFIXES = (".png", ".svg")
# Dark enough to be read when the picture is shown small; the baseline steps back.
BAR, BASELINE, WHISKER = "#1f4e8c", "#9aa7b8", "#222222"
WAYS = {"plain": "#9a5a1f", "speculative": "#1f4e8c"}
WIDTH = 9.0
FOOT = {"fontsize": 7, "color": "#555555"}


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
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UnsupportedError("plot needs matplotlib, which is not installed: pip install matplotlib") from None


def draw(rows: Sequence[Row], path: str, conditions: Mapping[str, Any]) -> bool:
    """Draw the rows that have something to draw, one below the other; conditions of all of them stand at the top.

    Returns:
        False where none has; nothing is written then.

    Raises:
        LoadError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [(row, painter) for row in rows if (painter := _painter(row)) is not None]
    if not drawn:
        return False
    heights = [_height(row) for row, _ in drawn]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_small(conditions), **FOOT)
    parts = figure.subfigures(len(drawn), 1, height_ratios=heights, squeeze=False)
    for part, (row, painter) in zip(parts[:, 0], drawn, strict=True):
        part.suptitle(f"{row.name}: {row.title}", fontsize=11)
        painter(part, row)
        part.supxlabel(_small(row.conditions), **FOOT)
    save(figure, path)
    return True


def save(figure: Any, path: str) -> None:
    """Write a figure.

    Raises:
        LoadError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error}; choose another --plot") from None


def _painter(row: Row) -> Callable[[Any, Row], None] | None:
    if any(line.get("plain_tokens_per_second") for line in row.lines):
        return _curves
    if any(line.get("oracle_tokens_per_second") for line in row.lines):
        return _points
    return _bars if any(line.get("tokens_per_second") for line in row.lines) else None


def _small(conditions: Mapping[str, Any]) -> str:
    return textwrap.fill(condition_line(conditions), 150)


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
    throughput, latency = part.subplots(1, 2)
    sizes = [line["batch"] for line in row.lines]
    for way, colour in WAYS.items():
        lines = [line for line in row.lines if line[f"{way}_tokens_per_second"] is not None]
        xs = [line["batch"] for line in lines]
        speeds, lows, highs = (
            [line[f"{way}_{name}"] for line in lines] for name in ("tokens_per_second", "low", "high")
        )
        throughput.plot(xs, speeds, "o-", color=colour, markersize=4, label=way)
        throughput.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
        latency.plot(
            xs, [line[f"{way}_latency_seconds"] for line in lines], "o-", color=colour, markersize=4, label=way
        )
    for axes in (throughput, latency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        for line in row.lines:
            if line["stops"]:
                axes.axvline(line["batch"], color="#c2452d", linestyle="--", linewidth=1, label="speculative slower")
    throughput.set(ylabel="tokens/s of all requests", xlabel="requests at once")
    latency.set(ylabel="seconds a request, median", xlabel="requests at once")
    throughput.legend(frameon=False, fontsize=9)


def _points(part: Any, row: Row) -> None:
    """Tokens a pass and speed-up by rate, beside the theory; at rate 1 passes by gamma, beside the fewest possible."""
    tokens, speed, passes = part.subplots(1, 3)
    rates = [line for line in row.lines if line["gamma"] == row.lines[0]["gamma"]]
    xs = [line["rate"] for line in rates]
    tokens.plot(xs, [line["expected"] for line in rates], "-", color=BASELINE, label="theory")
    tokens.plot(xs, [line["tau"] for line in rates], "o", color=BAR, markersize=5, label="measured")
    seen = [line for line in rates if line["ratio"] is not None]
    speed.plot(xs, [line["expected"] for line in rates], "-", color=BASELINE, label="passes cost alike")
    speed.plot(xs, [line["predicted"] for line in rates], "--", color=WAYS["plain"], label="with the passes' costs")
    speed.plot([line["rate"] for line in seen], [line["ratio"] for line in seen], "o", color=BAR, label="measured")
    sure = sorted((line for line in row.lines if line["rate"] == 1.0), key=lambda line: line["gamma"])
    gammas = [line["gamma"] for line in sure]
    passes.plot(gammas, [line["least"] for line in sure], "-", color=BASELINE, label="fewest possible")
    passes.plot(gammas, [line["passes"] for line in sure], "o", color=BAR, label="measured")
    tokens.set(ylabel="tokens a pass", xlabel=f"rate, gamma {row.lines[0]['gamma']}")
    speed.set(ylabel="speed-up over plain", xlabel="rate")
    passes.set(ylabel="passes, rate 1", xlabel="gamma")
    for axes in (tokens, speed, passes):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
