"""The rows of ``bench tasks`` as a picture: seconds an answer, a panel a task. Needs matplotlib; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sakiyomi.evaluation.bench.draw import BASELINE, COLOURS, WIDTH, foot, panels, save
from sakiyomi.evaluation.bench.report import Row

__all__ = ["bars", "draw"]


def draw(rows: Sequence[Row], path: str, conditions: Mapping[str, Any]) -> None:
    """Draw every row that has lines.

    Raises:
        LoadError: the file cannot be written.
    """
    shown = [row for row in rows if row.lines]
    if not shown:
        return
    figure, axes = panels(len(shown), 1, WIDTH, 3.2 * len(shown))
    for place, row in zip(axes, shown, strict=True):
        bars(place, row, (BASELINE, *COLOURS))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    foot(figure, {**shown[0].conditions, **conditions})
    save(figure, path)


def bars(axes: Any, row: Row, colours: Sequence[str]) -> None:
    """Seconds an answer by how the weights lie and by temperature, a bar a contender; its score stands in the table."""
    places = list(dict.fromkeys(_place(line) for line in row.lines))
    names = list(dict.fromkeys(line["name"] for line in row.lines))
    width = 0.84 / len(names)
    for number, name in enumerate(names):
        found = {_place(line): line["seconds_per_answer"] or 0.0 for line in row.lines if line["name"] == name}
        left = [place + (number - (len(names) - 1) / 2) * width for place in range(len(places))]
        colour = colours[number % len(colours)]
        axes.bar(left, [found.get(place, 0.0) for place in places], 0.92 * width, color=colour, label=name)
    axes.set_xticks(range(len(places)), places)
    axes.set(ylabel="seconds an answer", title=row.name)
    axes.grid(visible=False, axis="x")


def _place(line: Mapping[str, Any]) -> str:
    heat = line["temperature"]
    return f"{line['way']}, T {heat:g}" if heat else line["way"]
