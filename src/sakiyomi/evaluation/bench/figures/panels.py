"""What is drawn of each section of a report.

Most panels are declared in ``figures.toml``, by a kind and its arguments; what no declaration can say is a function
here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench import plot
from sakiyomi.evaluation.bench.draw import plain_numbers
from sakiyomi.evaluation.bench.figures import trees
from sakiyomi.evaluation.bench.kinds import built
from sakiyomi.evaluation.bench.long.plot import accuracy
from sakiyomi.evaluation.bench.pictures import (
    Height,
    Painter,
    Panel,
    Theme,
    curves,
    drawable,
    having,
    heat,
    stack,
)
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.tasks.run import seconds
from sakiyomi.theory import expected_tokens

GRID = [at / 100 for at in range(100)]
PARTS = {
    "weights": "weights of the target",
    "kv": "its keys and values",
    "draft_weights": "weights of the draft",
    "draft_kv": "its keys and values (draft)",
}


def _expected(axes: Any, row: Row, theme: Theme) -> None:
    """The formula as curves, one each gamma, and what was measured as marks."""
    marks = {"known rate": "o", "draft model": "*"}
    gammas = dict.fromkeys(line["gamma"] for line in row.lines)
    for gamma, colour in zip(gammas, theme.colours, strict=False):
        axes.plot(GRID, [expected_tokens(alpha, gamma) for alpha in GRID], color=colour, label=f"gamma {gamma}")
        for name, mark in marks.items():
            points = [line for line in row.lines if (line["gamma"], line["name"]) == (gamma, name)]
            look = {"markersize": 13, "markeredgecolor": theme.ink} if mark == "*" else {"markersize": 6}
            ends = ([line[key] for line in points] for key in ("alpha", "tau"))
            axes.plot(*ends, mark, color=colour, **look)
    for name, mark in marks.items():
        axes.plot([], [], mark, color=theme.faint, markersize=9, label=f"measured, {name}")
    axes.set(xlabel="alpha: share of judged tokens that were accepted", ylabel="tokens a target pass", ylim=(1, None))
    axes.legend(loc="upper left")


def _formulas(axes: Any, row: Row, theme: Theme) -> None:
    """Each formula with what it predicts and what was measured."""
    axes.set_axis_off()
    for at, line in enumerate(row.lines):
        axes.text(0.0, at, line["name"], fontsize=10, weight="bold", color=theme.ink)
        axes.text(0.0, at + 0.4, line["formula"], fontsize=10, color=theme.ink)
    for x, key, colour in ((0.72, "predicted", theme.colours[0]), (0.88, "measured", theme.colours[1])):
        axes.text(x, -0.6, key, fontsize=9, color=colour)
        for at, line in enumerate(row.lines):
            axes.text(x, at + 0.1, f"{line[key]:.3g}", fontsize=12, color=colour)
    axes.set(xlim=(0, 1.04), ylim=(len(row.lines), -0.9))


def _traffic(axes: Any, row: Row, theme: Theme) -> None:
    """Bytes read a token, in parts."""
    for place, line in enumerate(row.lines):
        for x, kind, hatch in ((place - 0.2, "predicted", "//"), (place + 0.2, "counted", "")):
            below = 0.0
            for (part, name), colour in zip(PARTS.items(), theme.colours, strict=False):
                value = line[f"{part}_{kind}_bytes"] / 1e6
                look = {"color": colour, "edgecolor": theme.paper, "hatch": hatch, "width": 0.38}
                axes.bar(x, value, bottom=below, label=None if place or hatch else name, **look)
                below += value
            axes.text(x, below, f"{below:.3g}", ha="center", va="bottom", fontsize=8)
    labels = ["plain" if not line["gamma"] else f"gamma {line['gamma']}" for line in row.lines]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(ylabel="MB read a token", title="left, hatched: predicted; right: counted")
    axes.grid(visible=False, axis="x")


def _lossless(axes: Any, row: Row, theme: Theme) -> None:
    """Of one place by token: q, and below it what was accepted and what was recovered, which end at p."""
    lines = having(row.lines, "token")
    at = range(len(lines))
    q, accepted, recovered, p = ([line[key] for line in lines] for key in ("q", "accepted", "recovered", "p"))
    beside = [place + 0.2 for place in at]
    axes.barh([place - 0.2 for place in at], q, height=0.36, color=theme.faint, label="q, the draft")
    axes.barh(beside, accepted, height=0.36, color=theme.colours[2], label="accepted, min(p, q)")
    axes.barh(beside, recovered, left=accepted, height=0.36, color=theme.colours[1], label="recovered")
    axes.vlines(p, [x - 0.02 for x in at], [x + 0.42 for x in at], color=theme.ink, linewidth=2, label="p, the target")
    axes.set_yticks(at, [drawable(repr(line["token"])) for line in lines], fontsize=8)
    axes.set(ylim=(len(lines) - 0.4, -0.6), xlabel="probability at one place")
    axes.legend(loc="lower right")


def _alphas(name: str) -> Panel:
    """Alpha at one temperature, as a table of targets by drafts."""

    def panel(axes: Any, row: Row, theme: Theme) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        targets, drafts = (list(dict.fromkeys(line[key] for line in row.lines)) for key in ("target", "draft"))
        shades = LinearSegmentedColormap.from_list("alpha", [theme.paper, theme.colours[0]])
        known = {(line["target"], line["draft"]): line[name] for line in row.lines}
        cells = [[known.get((target, draft), float("nan")) for draft in drafts] for target in targets]
        heat(axes, cells, targets, drafts, cmap=shades, vmin=0, vmax=1, edgecolors=theme.faint)
        axes.tick_params(axis="x", rotation=20)
        axes.set(title=f"alpha at {name.replace('T=', 'temperature ')}", ylabel="target", xlabel="draft")
        for (target, draft), value in known.items():
            place = (drafts.index(draft) + 0.5, targets.index(target) + 0.5)
            ink = theme.paper if value > 0.5 else theme.ink
            axes.text(*place, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink)

    return panel


def _series(at: int, name: str) -> Panel:
    """The first rounds as they came."""

    def panel(axes: Any, row: Row, theme: Theme) -> None:
        series = row.lines[0]["series"][name]
        axes.bar(range(1, len(series) + 1), series, width=0.8, color=theme.colours[at])
        axes.set(xlabel="round", ylabel=f"kept, {name}", ylim=(0, len(row.lines) - 0.9))
        axes.set_yticks([line["accepted"] for line in row.lines])
        axes.locator_params(axis="x", integer=True)

    return panel


def _heads(axes: Any, row: Row, theme: Theme) -> None:
    """How often the token was among the first guesses of each head."""
    lines = having(row.lines, "top 1")
    names = [name for name in lines[0] if name.startswith("top ")]
    for line in lines:
        axes.plot(names, [100 * line[name] for name in names], "o-", markersize=4, label=line["name"])
    axes.set(ylabel="places, percent", ylim=(0, 102))
    axes.legend(ncols=2, loc="lower right")


def _threshold(ys: Mapping[str, Any], **look: Any) -> Panel:
    """Curves by epsilon, of the lines about typical acceptance."""
    return curves("epsilon", ys, of=lambda lines: lines[2:], at="epsilon", xscale="log", **look)


def _the_same_heads(axes: Any, row: Row, theme: Theme) -> None:
    if (ratio := row.lines[1]["ratio"]) is not None:
        axes.axhline(ratio, color=theme.colours[2], linestyle="--", label="the same heads, lossless")
    axes.legend(loc="lower right")


def _kept(axes: Any, row: Row, theme: Theme) -> None:
    """Pairs that stayed, a row each head; the answer stands where the coloured line is."""
    table = [line["kept"] for line in row.lines]
    axes.imshow(table, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=(0, 100, len(table) - 0.5, -0.5))
    axes.set_yticks(range(len(table)), [f"{line['layer']}.{line['head']}" for line in row.lines], fontsize=7)
    axes.set(xlabel="place in the text, %", ylabel="layer.head")
    axes.grid(visible=False)
    for begin, end in json.loads(row.conditions["answer"]):
        axes.axvspan(100 * begin, 100 * end + 0.3, color=theme.colours[1], alpha=0.8)


def _diagonal(axes: Any, row: Row, theme: Theme) -> None:
    """Where predictions are right, and where they are 5 % off."""
    ends = [line[key] for line in row.lines for key in ("measured_speedup", "predicted_speedup")]
    low, high = 0.95 * min(ends), 1.05 * max(ends)
    axes.plot([low, high], [low, high], color=theme.faint, linewidth=1)
    axes.fill_between([low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high], color=theme.faint, alpha=0.25)
    axes.set(xlim=(low, high), ylim=(low, high))


def _tasks(row: Row) -> list[Panel]:
    """Seconds an answer, a panel each task."""

    def panel(name: str) -> Panel:
        part = Row(name, "", [line for line in row.lines if line["task"] == name])
        return lambda axes, _, theme: seconds(axes, part, theme)

    return [panel(name) for name in dict.fromkeys(line["task"] for line in row.lines)]


def _memory(row: Row) -> list[Panel]:
    """Right answers by memory, a panel each length."""
    if not (panels := accuracy(row)):
        raise InputError("no system answered; nothing can be drawn")
    return panels


PANELS: dict[str, Panel] = {
    "diagonal": _diagonal,
    "expected": _expected,
    "formulas": _formulas,
    "heads": _heads,
    "kept": _kept,
    "lossless": _lossless,
    "mask": trees.paint_mask,
    "places": trees.paint_places,
    "plain numbers": plain_numbers,
    "sparse": trees.paint_sparse,
    "the same heads": _the_same_heads,
    "traffic": _traffic,
    "tree": trees.paint_tree,
}
MADE: dict[str, Callable[..., Panel]] = {"alphas": _alphas, "series": _series, "threshold": _threshold, **plot.KINDS}
"""Kinds that have arguments."""
SEVERAL: dict[str, Callable[[Row], list[Panel]]] = {"memory": _memory, "tasks": _tasks}
"""Kinds of panels whose number depends on the row."""
HEIGHTS: dict[str, Height] = {"mask": trees.mask_height, "sparse": trees.sparse_height, "tree": trees.tree_height}


def painter(declared: Sequence[Mapping[str, Any]], *, below: bool = False) -> Painter:
    """What draws declared panels (see ``kinds.built``); ``below``: one legend stands below all of them."""

    def paint(row: Row, theme: Theme) -> Any:
        kinds: dict[str, Any] = {name: partial(lambda panel: panel, panel) for name, panel in PANELS.items()}
        kinds |= MADE | {name: partial(panels, row) for name, panels in SEVERAL.items()}
        panels, heights = zip(*built(declared, row, kinds, HEIGHTS), strict=True)
        return stack(*panels, height=heights, below=below)(row, theme)

    return paint
