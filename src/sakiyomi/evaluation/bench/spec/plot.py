"""The table of ``bench spec`` as a picture: bars by category, one a drafter. Needs matplotlib; imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from sakiyomi.evaluation.bench.draw import COLOURS, WIDTH, foot, panels, save
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.spec.results import PLAIN
from sakiyomi.evaluation.bench.spec.table import ALL

__all__ = ["draw"]


def draw(rows: Sequence[Row], path: str, conditions: Mapping[str, Any]) -> None:
    """Draw the speed-ups of the first row, ``spec``, those of all questions last; of a drafter without one a gap stays.

    Raises:
        LoadError: the file cannot be written.
    """
    row = rows[0]
    lines = [line for line in row.lines if line["name"] != PLAIN]
    categories = list(dict.fromkeys(name for line in lines for name in line["by_category"]))
    places, width = [*categories, ALL], 0.84 / max(len(lines), 1)
    # Wide enough that each bar is seen.
    figure, (axes,) = panels(1, 1, max(WIDTH, 0.13 * len(lines) * len(places) + 2), 4.4)
    for number, line in enumerate(lines):
        found = {name: own["speedup"] for name, own in line["by_category"].items()} | {ALL: line[ALL]}
        heights = [found.get(name) or 0.0 for name in places]
        left = [place + (number - (len(lines) - 1) / 2) * width for place in range(len(places))]
        repeated = number // len(COLOURS)
        label = f"{line['name']} ({line[ALL]:.2f}x)" if line[ALL] else f"{line['name']} (other text than plain)"
        axes.bar(left, heights, 0.92 * width, color=COLOURS[number % len(COLOURS)], alpha=1 - 0.4 * min(repeated, 1),
                 label=label)  # fmt: skip
    axes.axhline(1.0, color="#222222", linewidth=1)
    axes.axvline(len(categories) - 0.5, color="#999999", linewidth=0.8, linestyle=":")
    tilt: dict[str, Any] = {"rotation": 20, "ha": "right"} if len(places) > 8 else {}
    axes.set_xticks(range(len(places)), places, **tilt)
    axes.set(ylabel="speed-up over plain decoding", title=textwrap.fill(row.title, 100))
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    foot(figure, {**row.conditions, **conditions})
    save(figure, path)
