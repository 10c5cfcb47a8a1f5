"""Pictures of the rows of ``bench long``, and of what a cache kept. Needs matplotlib; imports no torch.

One file each for right answers against memory, memory against length, memory against turns, and books.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.draw import MARK, WIDTH, need_matplotlib
from sakiyomi.evaluation.bench.pictures import MARKS, Lines, Panel, Theme, drawable, drawing
from sakiyomi.evaluation.bench.report import Row

HEIGHT = 4.6
CELLS = 400
"""Columns of the map of kept tokens: of a longer text each is the mean over several tokens."""
WORDS = 16  # of the text, below that map
ASIDE = "keys and values, MB (side by side where alike)"
CLASSES = {
    "one-shot": "full, in one pass",
    "full": "full, in chunks",
    "reduced": "all pairs, smaller or elsewhere",
    "bounded": "budget",
}


def check(folder: str, name: str = "plot") -> None:
    """Check, before anything is measured, that pictures can be written; the folder is created.

    Args:
        folder: for pictures.
        name: of the parameter that it was given as.

    Raises:
        InputError: it cannot be a folder.
        UnsupportedError: matplotlib is not installed.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{name} is {folder!r}, which cannot be a folder ({error.strerror}); name another") from None
    if not os.access(place, os.W_OK):
        raise InputError(f"{name} is {folder!r}, where nothing can be written; name another folder")
    need_matplotlib(name)


def draw(rows: Sequence[Row], folder: str, conditions: Mapping[str, Any]) -> list[Path]:
    """Draw each row that has figures into its own file.

    Returns:
        The files that were written, of accuracy.png, memory.png, turns.png, books.png.

    Raises:
        LoadError: one cannot be written.
    """
    painters = {"long": ("accuracy", accuracy), "memory": ("memory", _memory), "books": ("books", _books)}
    painters["turns"] = ("turns", _turns)
    by_name, written = {row.name: row for row in rows}, []
    for name, (file, panels_of) in painters.items():
        panels = panels_of(by_name[name]) if name in by_name else []
        if panels:
            row = by_name["long" if name == "memory" else name]  # growth is shown beside the lines that it is of
            path = Path(folder) / f"{file}.png"
            drawing(path, [(panel, row, HEIGHT) for panel in panels], {**row.conditions, **conditions}, legend=True)
            written.append(path)
    return written


def _system(line: Mapping[str, Any]) -> str:
    """Its name without the star of the longest context that fits."""
    return str(line["name"]).removesuffix(" *")


def _name(line: Mapping[str, Any]) -> str:
    """System and budget."""
    return " ".join(filter(None, (_system(line), line["budget"])))


def _groups(lines: Lines, *needs: str) -> dict[str, list[Mapping[str, Any]]]:
    """Lines with these figures by system and budget, in order."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        if all(line.get(key) is not None for key in needs):
            groups[_name(line)].append(line)
    return groups


def _styles(groups: Mapping[str, Lines], theme: Theme) -> dict[str, dict[str, Any]]:
    """A colour for each system and a mark for each budget; if colours repeat, the marks differ."""
    systems, budgets = (
        list(dict.fromkeys(of(lines[0]) for lines in groups.values())) for of in (_system, itemgetter("budget"))
    )
    found = {}
    for name, (line, *_) in groups.items():
        again, colour = divmod(systems.index(_system(line)), len(theme.colours))
        mark = MARKS[(again * len(budgets) + budgets.index(line["budget"])) % len(MARKS)]
        found[name] = {"color": theme.colours[colour], "marker": mark, "markersize": 5}
    return found


def accuracy(row: Row) -> list[Panel]:
    """Right answers against bytes of keys and values, a panel each length that was asked for."""
    groups = _groups(row.lines, "accuracy", "kv_bytes")
    lengths = sorted({line["length"] for group in groups.values() for line in group if not line["starred"]})
    return [partial(_panel_points, groups, length, "accuracy", 100.0, "right answers, percent") for length in lengths]


def _books(row: Row) -> list[Panel]:
    """Perplexity and agreement against bytes of keys and values, for the longest context."""
    groups = _groups(row.lines, "perplexity", "kv_bytes", "agreement")
    longest = max((line["length"] for group in groups.values() for line in group), default=0)
    kinds = [("perplexity", 1.0, "perplexity"), ("agreement", 100.0, "tokens that full expects too, percent")]
    return [partial(_panel_points, groups, longest, *kind) for kind in kinds if groups]


def _panel_points(
    groups: Mapping[str, Lines], length: int, key: str, scale: float, label: str, axes: Any, row: Row, theme: Theme
) -> None:
    """A point a system, with its spread, at the bytes that it holds.

    Systems with the same bytes are drawn side by side, so that none hides another.
    """
    styles = _styles(groups, theme)
    shown = [(name, line) for name, group in groups.items() for line in group if line["length"] == length]
    for name, line in shown:
        size, value, spread = line["kv_bytes"], scale * line[key], scale * (line[f"{key}_spread"] or 0.0)
        alike = [id(other) for _, other in shown if abs(other["kv_bytes"] - size) <= 0.01 * size]
        place = size / 1e6 * (1.0 + 0.02 * (alike.index(id(line)) - (len(alike) - 1) / 2))
        ends = [[min(spread, value)], [min(spread, 100 - value) if scale == 100 else spread]]
        axes.errorbar(place, value, yerr=ends, linestyle="none", capsize=3, label=name, **styles[name])
    axes.set(xscale="log", title=f"{length} tokens", xlabel=ASIDE, ylabel=label)
    if key == "accuracy":
        axes.set_ylim(-4, 104)
    _plain_ticks(axes.xaxis)


def _memory(growth: Row) -> list[Panel]:
    """Keys and values, and what the process grew by, against the length: of each class of systems its first one.

    Both axes are logarithmic, so that the slope is the exponent. Budgets that are a share of the context are a class of
    their own.
    """
    classes = {(fit["class"], fit["on_paper"]): fit for fit in reversed(growth.lines)}
    fits = [fit for fit in growth.lines if fit in classes.values()]
    kinds = [("kv_bytes", "kv_slope", "keys and values, MB"), ("grown_bytes", "process_slope", "process grown by, MB")]
    measured = any(fit.get("process_slope") is not None for fit in growth.lines)
    return [partial(_panel_growth, fits, *kind) for kind in kinds[: 1 + measured]]


def _panel_growth(fits: Lines, size: str, exponent: str, label: str, axes: Any, table: Row, theme: Theme) -> None:
    for fit, colour in zip(fits, theme.colours, strict=False):
        lines = [line for line in table.lines if _name(line) == _name(fit) and (line.get(size) or 0) > 0]
        slope = "" if fit.get(exponent) is None else f": slope {fit[exponent]:.2f}"
        shown = CLASSES[fit["class"]] + ("" if _name(fit) == fit["class"] else f" ({_name(fit)})") + slope
        lines.sort(key=itemgetter("length"))
        lengths, heights = [line["length"] for line in lines], [line[size] / 1e6 for line in lines]
        axes.plot(lengths, heights, f"{MARKS[0]}-", color=colour, label=shown, markersize=5)
    lengths = sorted({line["length"] for line in table.lines if line.get("kv_bytes") and not line["starred"]})
    axes.set(xscale="log", yscale="log", xlabel="tokens of the context", ylabel=label)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    _plain_ticks(axes.yaxis)


def _turns(row: Row) -> list[Panel]:
    """Bytes of keys and values after each turn."""
    groups = _groups(row.lines, "series")
    return [partial(_panel_turns, groups)] if groups else []


def _panel_turns(groups: Mapping[str, Lines], axes: Any, row: Row, theme: Theme) -> None:
    styles = _styles(groups, theme)
    for name, (line, *_) in groups.items():
        sizes = [size / 1e6 for size in line["series"]["kv"]]
        label = f"{name}, {100 * line['accuracy']:.0f} % right"
        axes.plot(line["series"]["tokens"], sizes, label=label, **styles[name])
    axes.set(xlabel="tokens of the conversation", ylabel="keys and values, MB", yscale="log")
    _plain_ticks(axes.yaxis)


def _plain_ticks(axis: Any) -> None:
    """1, 2 and 5 of each power of ten, as plain numbers: ranges here are often within one power."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.axes.minorticks_off()


def kept_map(
    kept: Sequence[Sequence[Sequence[int]]],
    tokens: Sequence[str],
    path: str | Path,
    spans: Sequence[tuple[int, int]] = (),
    title: str = "",
) -> None:
    """Draw which tokens each layer and head kept, as a heat map over the text.

    A row is a head, layers from top to bottom; a column is a token, or the mean of several in a text of more than
    ``CELLS``. A dark cell was kept; the share of the text that a layer kept stands at its right.

    Args:
        kept: for each layer and KV head the places of the tokens whose pairs are held.
        tokens: the text, one word a token.
        path: of the .png file.
        spans: (begin, end) places that are marked: where an answer stands.
        title: above the picture.

    Raises:
        LoadError: the file cannot be written.
    """
    layers = [shares(layer, len(tokens)) for layer in kept]
    panel = partial(_panel_map, layers, tokens, spans, title)
    drawing(path, [(panel, Row("kept", title, ()), 1.9 + 0.16 * sum(map(len, layers)))], width=WIDTH)


def _panel_map(
    layers: Sequence[np.ndarray[Any, Any]],
    tokens: Sequence[str],
    spans: Sequence[tuple[int, int]],
    title: str,
    axes: Any,
    _: Row,
    theme: Theme,
) -> None:
    table, count = np.concatenate(layers), len(tokens)
    axes.grid(visible=False)
    look = {"cmap": "Blues", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(table, extent=(0, count, len(table), 0), **look)  # columns in tokens, rows in heads, the first on top
    row = 0
    for layer, own in enumerate(layers):
        axes.axhline(row, color=theme.faint, linewidth=0.5)
        middle = row + len(own) / 2
        axes.text(1.005 * count, middle, f"{100 * own.mean():.0f} %", va="center", fontsize=7)
        axes.text(-0.005 * count, middle, f"layer {layer}", va="center", ha="right", fontsize=7)
        row += len(own)
    for begin, end in spans:
        axes.axvspan(begin, max(end, begin + 1), color=MARK, alpha=0.25, linewidth=0)
        # A few tokens of thousands are thinner than a line.
        axes.plot((begin + end) / 2, 0, "v", color=MARK, markersize=6, clip_on=False)
    places = np.unique(np.linspace(0, count - 1, WORDS).astype(int))
    words = [f"{drawable(tokens[place].strip()[:12]) or '·'} {place}" for place in places]
    axes.set_xticks(places + 0.5, words, rotation=60, ha="right", fontsize=7)
    axes.set_yticks([])
    axes.set_title(title, fontsize=10)


def shares(layer: Sequence[Sequence[int]], length: int, cells: int = CELLS) -> np.ndarray[Any, Any]:
    """(heads, columns): share of each column's tokens that a head kept; a text has at most ``cells`` columns."""
    edges = np.linspace(0, length, min(length, cells) + 1).astype(int)
    return np.array([np.histogram(own, edges)[0] for own in layer]) / np.diff(edges)
