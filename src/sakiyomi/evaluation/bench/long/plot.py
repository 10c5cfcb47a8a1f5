"""Pictures of the rows of ``bench long``, and of what a cache kept. Needs matplotlib; imports no torch.

One file a question: right answers against memory, memory against length, memory against turns, books.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.draw import COLOURS, MARK, NARROW, WIDTH, foot, need_matplotlib, panels, save
from sakiyomi.evaluation.bench.pictures import drawable, legend_once
from sakiyomi.evaluation.bench.report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["accuracy", "check", "draw", "kept_map"]

MARKS = "os^vDPX*"
HEIGHT = 4.6
CELLS = 400
"""Columns of the map of kept tokens: of a longer text each is the mean over several tokens."""
WORDS = 16  # of the text, below that map
ASIDE = "(side by side where alike)"
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
    painters = {"long": (accuracy, "accuracy"), "turns": (_turns, "turns"), "books": (_books, "books")}
    written = []
    by_name = {row.name: row for row in rows}
    for name, (painter, file) in painters.items():
        if name in by_name and (figure := painter(by_name[name])) is not None:
            written.append(_save(figure, Path(folder) / f"{file}.png", by_name[name], conditions))
    if "memory" in by_name:
        figure = _memory(by_name["long"], by_name["memory"])
        written.append(_save(figure, Path(folder) / "memory.png", by_name["long"], conditions))
    return written


def _figure(count: int = 1, height: float = HEIGHT, *, stacked: bool = False) -> tuple[Figure, list[Any]]:
    return panels(count, 1, NARROW, 0.75 * count * height) if stacked else panels(1, count, WIDTH, height)


def _save(figure: Figure, path: Path, row: Row, conditions: Mapping[str, Any]) -> Path:
    foot(figure, {**row.conditions, **conditions})
    save(figure, path)
    return path


def _groups(lines: Sequence[Mapping[str, Any]], *needs: str) -> dict[str, list[Mapping[str, Any]]]:
    """Lines with these figures by system and budget, in order."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if all(line.get(key) is not None for key in needs):
            name = str(line["name"]).removesuffix(" *")
            groups.setdefault(f"{name} {line['budget']}" if line["budget"] else name, []).append(line)
    return groups


def _styles(
    groups: Mapping[str, Sequence[Mapping[str, Any]]], colours: Sequence[str] = COLOURS
) -> dict[str, dict[str, Any]]:
    """A colour a system and a mark a budget; of more systems than colours the marks go on."""
    heads = {name: (str(group[0]["name"]).removesuffix(" *"), group[0]["budget"]) for name, group in groups.items()}
    systems = list(dict.fromkeys(system for system, _ in heads.values()))
    budgets = list(dict.fromkeys(budget for _, budget in heads.values() if budget is not None))
    found = {}
    for name, (system, budget) in heads.items():
        place = systems.index(system)
        mark = place // len(colours) * max(len(budgets), 1) + (budgets.index(budget) if budget is not None else 0)
        found[name] = {"color": colours[place % len(colours)], "marker": MARKS[mark % len(MARKS)], "markersize": 5}
    return found


def accuracy(row: Row, colours: Sequence[str] = COLOURS, *, stacked: bool = False) -> Figure | None:
    """Right answers against bytes of keys and values, one panel a length that was asked for.

    Args:
        row: of `bench long`.
        colours: of the systems.
        stacked: panels stand one below the other, and the legend below them: for narrow pages.
    """
    groups = _groups(row.lines, "accuracy", "kv_bytes")
    lengths = sorted({line["length"] for group in groups.values() for line in group if not line["starred"]})
    if not lengths:
        return None
    figure, parts = _figure(len(lengths), stacked=stacked)
    styles = _styles(groups, colours)
    for axes, length in zip(parts, lengths, strict=True):
        shown = [(name, line) for name, group in groups.items() for line in group if line["length"] == length]
        for name, line in shown:
            right, spread = 100 * line["accuracy"], 100 * (line["accuracy_spread"] or 0.0)
            _point(axes, name, line, shown, right, [[min(spread, right)], [min(spread, 100 - right)]], styles)
        axes.set(xscale="log", ylim=(-4, 104), title=f"{length} tokens", xlabel=f"keys and values, MB {ASIDE}")
        _plain_ticks(axes.xaxis)
    for axes in parts if stacked else parts[:1]:
        axes.set_ylabel("right answers, percent")
    legend_once(figure, parts, below=stacked)
    return figure


def _memory(table: Row, growth: Row) -> Figure:
    """Keys and values, and what the process grew by, against the length: of each class of systems its first one.

    Both axes go by powers, so that the exponent is the slope. A budget that is a share of the context is a class of its
    own.
    """
    groups = list(_groups(table.lines, "kv_bytes").values())
    classes: dict[tuple[str, float], Any] = {}
    for fit in growth.lines:
        classes.setdefault((fit["class"], fit["on_paper"]), fit)
    measured = any(line["grown_bytes"] is not None for group in groups for line in group)
    figure, parts = _figure(2 if measured else 1)
    kinds = [("kv_bytes", "kv_slope", "keys and values, MB"), ("grown_bytes", "process_slope", "process grown by, MB")]
    for axes, (size, exponent, label) in zip(parts, kinds, strict=False):
        for place, fit in enumerate(classes.values()):
            lines = [line for line in table.lines if (line["name"].removesuffix(" *"), line["budget"]) == _key(fit)]
            points = sorted((line["length"], line[size] / 1e6) for line in lines if (line.get(size) or 0) > 0)
            if not points:
                continue
            slope = "" if fit.get(exponent) is None else f": slope {fit[exponent]:.2f}"
            name = " ".join(filter(None, _key(fit)))
            shown = CLASSES[fit["class"]] + ("" if name == fit["class"] else f" ({name})") + slope
            axes.plot(*zip(*points, strict=True), label=shown, color=COLOURS[place], marker=MARKS[0], markersize=5)
        axes.set(xscale="log", yscale="log", xlabel="tokens of the context", ylabel=label)
        lengths = sorted({line["length"] for group in groups for line in group if not line["starred"]})
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.xaxis.set_minor_locator(_nothing())
        _plain_ticks(axes.yaxis)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _key(line: Mapping[str, Any]) -> tuple[str, Any]:
    return line["name"], line["budget"]


def _nothing() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _plain_ticks(axis: Any) -> None:
    """1, 2 and 5 of each power of ten, as plain numbers: ranges here are often within one power."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(_nothing())


def _beside(line: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float:
    """Where a point stands, in MB: systems of one budget hold the same bytes, and one would hide the others.

    Those that hold as many bytes as others stand side by side around them; all others stand at their own.
    """
    size = line["kv_bytes"]
    alike = [other for other in lines if abs(other["kv_bytes"] - size) <= 0.01 * size]
    place = next(at for at, other in enumerate(alike) if other is line)
    return float(size / 1e6 * (1.0 + 0.02 * (place - (len(alike) - 1) / 2)))


def _point(
    axes: Any,
    name: str,
    line: Mapping[str, Any],
    shown: Sequence[tuple[str, Mapping[str, Any]]],
    value: float,
    reach: Any,
    styles: Mapping[str, dict[str, Any]],
) -> None:
    """Plot a system's figure against the bytes that it holds, beside systems that hold as many."""
    place = _beside(line, [other for _, other in shown])
    axes.errorbar(place, value, yerr=reach, linestyle="none", capsize=3, label=name, **styles[name])


def _turns(row: Row) -> Figure | None:
    """Bytes of keys and values after each turn."""
    groups = _groups(row.lines, "series")
    if not groups:
        return None
    figure, (axes,) = _figure()
    styles = _styles(groups)
    for name, (line, *_) in groups.items():
        series = line["series"]
        share = f", {100 * line['accuracy']:.0f} % right"
        axes.plot(series["tokens"], [size / 1e6 for size in series["kv"]], label=name + share, **styles[name])
    axes.set(xlabel="tokens of the conversation", ylabel="keys and values, MB", yscale="log")
    _plain_ticks(axes.yaxis)
    legend_once(figure, [axes])
    return figure


def _books(row: Row) -> Figure | None:
    """Perplexity and agreement against bytes of keys and values, for the longest context."""
    groups = _groups(row.lines, "perplexity", "kv_bytes", "agreement")
    if not groups:
        return None
    longest = max(line["length"] for group in groups.values() for line in group)
    figure, parts = _figure(2)
    styles = _styles(groups)
    kinds = [("perplexity", 1.0, "perplexity"), ("agreement", 100.0, "tokens that full expects too, percent")]
    for axes, (key, scale, label) in zip(parts, kinds, strict=True):
        shown = [(name, line) for name, group in groups.items() for line in group if line["length"] == longest]
        for name, line in shown:
            spread = line[f"{key}_spread"]
            _point(axes, name, line, shown, scale * line[key], scale * spread if spread else None, styles)
        axes.set(xscale="log", xlabel=f"keys and values, MB {ASIDE}", ylabel=label, title=f"{longest} tokens")
        _plain_ticks(axes.xaxis)
    legend_once(figure, parts)
    return figure


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
    shares = np.concatenate([_shares(np.asarray(layer), len(tokens), i) for i, layer in enumerate(kept)])
    figure, (axes,) = _figure(height=1.9 + 0.16 * len(shares))
    axes.grid(visible=False)
    axes.imshow(
        shares, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=_extent(tokens, shares)
    )
    row = 0
    for layer, places in enumerate(kept):
        heads = len(places)
        axes.axhline(row, color="#888888", linewidth=0.5)
        share = shares[row : row + heads].mean()
        axes.text(1.005 * len(tokens), row + heads / 2, f"{100 * share:.0f} %", va="center", fontsize=7)
        axes.text(-0.005 * len(tokens), row + heads / 2, f"layer {layer}", va="center", ha="right", fontsize=7)
        row += heads
    for begin, end in spans:
        axes.axvspan(begin, max(end, begin + 1), color=MARK, alpha=0.25, linewidth=0)
        # A few tokens of thousands are thinner than a line.
        axes.plot((begin + end) / 2, 0, "v", color=MARK, markersize=6, clip_on=False)
    places = np.unique(np.linspace(0, len(tokens) - 1, WORDS).astype(int))
    axes.set_xticks(
        places + 0.5, [_word(tokens[place], place) for place in places], rotation=60, ha="right", fontsize=7
    )
    axes.set_yticks([])
    axes.set_title(title or "pairs kept by layer and head; right: share of the text", fontsize=10)
    save(figure, path, "place")


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


def _extent(tokens: Sequence[str], shares: np.ndarray[Any, Any]) -> tuple[float, float, float, float]:
    """Columns in tokens, rows in heads, the first on top."""
    return (0, len(tokens), len(shares), 0)


def _word(token: str, place: int) -> str:
    """A token for an axis, with where it stands."""
    return f"{drawable(token.strip()[:12]) or '·'} {place}"
