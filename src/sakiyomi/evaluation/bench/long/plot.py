"""Pictures of the rows of ``bench long``, and of what a cache kept. Needs matplotlib; imports no torch.

One file a question: right answers against memory, memory against length, memory against turns, books.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
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
    """Refuse before any measuring what could not be drawn after it; the folder is made.

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
    """Draw what there is to draw, each into a file of its own.

    Returns:
        The files: accuracy.png, memory.png, turns.png, books.png, as far as they are.

    Raises:
        LoadError: one cannot be written.
    """
    painters = {"long": ("accuracy", accuracy), "memory": ("memory", _memory), "books": ("books", _books)}
    painters["turns"] = ("turns", _turns)
    by_name, written = {row.name: row for row in rows}, []
    for name, (file, panels_of) in painters.items():
        # Growth is told beside the lines that it is of.
        row = by_name.get("long" if name == "memory" else name)
        panels = panels_of(by_name[name]) if name in by_name else []
        if row is not None and panels:
            path = Path(folder) / f"{file}.png"
            drawing(path, [(panel, row, HEIGHT) for panel in panels], {**row.conditions, **conditions}, legend=True)
            written.append(path)
    return written


def _groups(lines: Lines, *needs: str) -> dict[str, list[Mapping[str, Any]]]:
    """Lines with these figures by system and budget, in order."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if all(line.get(key) is not None for key in needs):
            groups.setdefault(_name(line), []).append(line)
    return groups


def _name(line: Mapping[str, Any]) -> str:
    """System and budget; the star of the longest context that fits is left out."""
    return " ".join(filter(None, (str(line["name"]).removesuffix(" *"), line["budget"])))


def _styles(groups: Mapping[str, Lines], theme: Theme) -> dict[str, dict[str, Any]]:
    """A colour a system and a mark a budget; of more systems than colours the marks continue."""
    heads = {name: (str(group[0]["name"]).removesuffix(" *"), group[0]["budget"]) for name, group in groups.items()}
    systems = list(dict.fromkeys(system for system, _ in heads.values()))
    budgets = [None, *dict.fromkeys(budget for _, budget in heads.values() if budget is not None)]
    found = {}
    for name, (system, budget) in heads.items():
        lap, place = divmod(systems.index(system), len(theme.colours))
        mark = lap * len(budgets) + budgets.index(budget)
        found[name] = {"color": theme.colours[place], "marker": MARKS[mark % len(MARKS)], "markersize": 5}
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

    Systems of one budget hold the same bytes, and one would hide the others: they stand side by side.
    """
    styles = _styles(groups, theme)
    shown = [(name, line) for name, group in groups.items() for line in group if line["length"] == length]
    for name, line in shown:
        size, value, spread = line["kv_bytes"], scale * line[key], scale * (line[f"{key}_spread"] or 0.0)
        alike = [id(other) for _, other in shown if abs(other["kv_bytes"] - size) <= 0.01 * size]
        place = size / 1e6 * (1.0 + 0.02 * (alike.index(id(line)) - (len(alike) - 1) / 2))
        reach = [[min(spread, value)], [min(spread, 100 - value) if scale == 100 else spread]]
        axes.errorbar(place, value, yerr=reach, linestyle="none", capsize=3, label=name, **styles[name])
    axes.set(xscale="log", title=f"{length} tokens", xlabel=ASIDE, ylabel=label)
    if key == "accuracy":
        axes.set_ylim(-4, 104)
    _plain_ticks(axes.xaxis)


def _memory(growth: Row) -> list[Panel]:
    """Keys and values, and what the process grew by, against the length: of each class of systems its first one.

    Both axes go by powers, so that the exponent is the slope. A budget that is a share of the context is a class of its
    own.
    """
    classes: dict[tuple[str, float], Any] = {}
    for fit in growth.lines:
        classes.setdefault((fit["class"], fit["on_paper"]), fit)
    kinds = [("kv_bytes", "kv_slope", "keys and values, MB"), ("grown_bytes", "process_slope", "process grown by, MB")]
    measured = any(fit.get("process_slope") is not None for fit in growth.lines)
    return [partial(_panel_growth, list(classes.values()), *kind) for kind in kinds[: 1 + measured]]


def _panel_growth(fits: Lines, size: str, exponent: str, label: str, axes: Any, table: Row, theme: Theme) -> None:
    for fit, colour in zip(fits, theme.colours, strict=False):
        lines = [line for line in table.lines if _name(line) == _name(fit)]
        points = sorted((line["length"], line[size] / 1e6) for line in lines if (line.get(size) or 0) > 0)
        if points:
            slope = "" if fit.get(exponent) is None else f": slope {fit[exponent]:.2f}"
            shown = CLASSES[fit["class"]] + ("" if _name(fit) == fit["class"] else f" ({_name(fit)})") + slope
            axes.plot(*zip(*points, strict=True), label=shown, color=colour, marker=MARKS[0], markersize=5)
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
        share = f"{name}, {100 * line['accuracy']:.0f} % right"
        axes.plot(line["series"]["tokens"], sizes, label=share, **styles[name])
    axes.set(xlabel="tokens of the conversation", ylabel="keys and values, MB", yscale="log")
    _plain_ticks(axes.yaxis)


def _plain_ticks(axis: Any) -> None:
    """1, 2 and 5 of each power of ten, as plain numbers: ranges here are often within one power."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.axes.minorticks_off()


def kept_map(
    kept: Sequence[np.ndarray[Any, Any]],
    tokens: Sequence[str],
    path: str | Path,
    *,
    spans: Sequence[tuple[int, int]] = (),
    title: str = "",
) -> None:
    """Draw which tokens each layer and head kept, as a heat map over the text.

    A row is a head, layers from top to bottom; a column is a token, or the mean of several in a text of more than
    ``CELLS``. A dark cell was kept.

    Args:
        kept: for each layer (KV heads, n) integers: the places of the tokens whose pairs are held; n may differ between
            layers. A place below 0 is none: heads of one layer that kept fewer are filled up so.
        tokens: the text, one word a token.
        path: of the .png file.
        spans: (begin, end) places that are marked: where an answer stands.
        title: above the picture.

    Raises:
        InputError: a place lies outside of the text, or there is no text or layer.
        LoadError: the file cannot be written.
    """
    if not kept or not tokens:
        raise InputError(f"kept has {len(kept)} layers and the text {len(tokens)} tokens; give at least one of each")
    layers = [_shares(np.asarray(layer), len(tokens), i) for i, layer in enumerate(kept)]
    title = title or "pairs kept by layer and head; right: share of the text"
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
    shares, count = np.concatenate(layers), len(tokens)
    axes.grid(visible=False)
    look = {"cmap": "Blues", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(shares, extent=(0, count, len(shares), 0), **look)  # columns in tokens, rows in heads, the first on top
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


def _shares(places: np.ndarray[Any, Any], length: int, layer: int) -> np.ndarray[Any, Any]:
    """(heads, columns): share of each column's tokens that a head kept."""
    if places.ndim != 2 or places.dtype.kind not in "iu" or (places.size and places.max() >= length):
        raise InputError(
            f"kept of layer {layer} has the shape {places.shape} and the type {places.dtype}; expected (KV heads, n) "
            f"integers below {length}, the tokens of the text"
        )
    marks = np.zeros((len(places), length))
    for head, own in enumerate(places):
        marks[head, own[own >= 0]] = 1.0
    edges = np.linspace(0, length, min(length, CELLS) + 1).astype(int)
    return np.add.reduceat(marks, edges[:-1], axis=1) / np.diff(edges)
