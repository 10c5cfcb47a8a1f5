"""Kinds of panels that are declared in ``plots.toml`` and ``figures.toml``, beside curves: columns and bars."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sakiyomi.evaluation.bench.pictures import (
    HEIGHT,
    Height,
    Lines,
    Of,
    Panel,
    Series,
    Theme,
    chosen,
    curves,
    grouped,
    parts,
    ticks,
)
from sakiyomi.evaluation.bench.report import Row


def over(*panels: Panel) -> Panel:
    """A panel of several ones, drawn on the same axes."""

    def panel(axes: Any, row: Row, theme: Theme) -> None:
        for one in panels:
            one(axes, row, theme)

    return panel


def columns(
    names: str,
    ys: Series,
    *,
    by: str | None = None,
    scale: float = 1.0,
    whiskers: Sequence[str] | None = None,
    dashes: str | None = None,
    text: str | None = None,
    first: int = 0,
    **look: Any,
) -> Panel:
    """A panel of vertical bars in groups, a group a name.

    Args:
        names: key of the names. Whole numbers, one after the other, stand at their own places.
        ys: the figures, a bar each; their styles do not count.
        by: a bar for each value of this key, of the only figure of ``ys``.
        scale: values are multiplied by it.
        whiskers: names of lowest and highest value.
        dashes: ending of the names of figures that a dash in front of the bars shows.
        text: format string of what stands on a bar, given its line; bars without a value have none.
        first: of the theme's colours.
        look: given to ``axes.set``.
    """

    def panel(axes: Any, row: Row, theme: Theme) -> None:
        groups = list(dict.fromkeys(line[names] for line in row.lines))
        found = [(y, label, {line[names]: line for line in own}) for y, label, _, own in parts(row.lines, ys, by)]
        series = {
            # Legends leave out names that begin with an underscore.
            label or f"_{y}": [scale * (own[group][y] or 0.0) if group in own else None for group in groups]
            for y, label, own in found
        }
        start = groups[0] if isinstance(groups[0], int) else 0
        places = grouped(axes, list(map(str, groups)), series, theme.colours[first:], start)
        for (y, _, own), xs in zip(found, places, strict=True):
            known = [(x, own[group]) for x, group in zip(xs, groups, strict=True) if group in own and own[group][y]]
            for x, line in known:
                low, high = (scale * line[end] for end in whiskers or (y, y))
                if whiskers:
                    axes.vlines(x, low, high, color=theme.ink, linewidth=1)
                if text is not None:
                    where: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
                    axes.annotate(said(text, line), (x, high), (0, 2), **where)
            for colour, width in ((theme.paper, 5), (theme.ink, 2)) if dashes else ():
                tops = [scale * own[group][f"{y}{dashes}"] for group in groups]
                axes.plot(xs, tops, "_", color=colour, markersize=14, markeredgewidth=width)
        axes.margins(y=0.15)
        axes.set(**look)

    return panel


def bars(
    ys: Series,
    *,
    of: Of = None,
    names: str = "{name}",
    colours: Sequence[int] | None = None,
    marks: Mapping[str, str] | None = None,
    text: str = "{value:.2f}",
    **look: Any,
) -> Panel:
    """A panel of horizontal bars, the first line on top, each bar with its value after it.

    Args:
        ys: the figures, a bar each in every line; their styles do not count.
        of: the lines, see ``chosen``.
        names: format string of the name of a line.
        colours: of the theme's, line by line, the last one for all further ones; by default one each figure.
        marks: names of figures that a diamond shows, by figure.
        text: format string of what is written after a bar, given ``value`` and ``mark``.
        look: given to ``axes.set``.
    """

    def panel(axes: Any, row: Row, theme: Theme) -> None:
        lines, width = chosen(row.lines, of), 0.72 / len(ys)
        for at, (y, label, _, _) in enumerate(parts(lines, ys, None)):
            xs = [place + width * (at - (len(ys) - 1) / 2) for place in range(len(lines))]
            for place, (x, line) in enumerate(zip(xs, lines, strict=True)):
                colour = theme.colours[at if colours is None else colours[min(place, len(colours) - 1)]]
                value, mark = line[y] or 0.0, line[marks[y]] if marks else None
                axes.barh(x, value, height=0.92 * width, color=colour, label=None if place else label or None)
                if mark is not None:
                    axes.plot(mark, x, "D", color=theme.ink, markersize=4)
                # Offset, not spaces in front of the number: SVG drops those.
                where: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}
                told = said(text, {"value": value, "mark": mark})
                axes.annotate(told, (max(value, mark or 0.0), x), (6, 0), **where)
        ticks(axes, "y", [said(names, line).replace("+", "\n+ ") for line in lines], fontsize=8)
        axes.margins(x=0.2)
        axes.set(ylim=(len(lines) - 0.4, -0.6), **look)
        axes.grid(visible=False, axis="y")

    return panel


KINDS: dict[str, Callable[..., Panel]] = {"bars": bars, "columns": columns, "curves": curves}


def built(
    declared: Lines, row: Row, kinds: Mapping[str, Any], heights: Mapping[str, Height]
) -> list[tuple[Panel, Height]]:
    """Declared panels of a row, each with its inches.

    Args:
        declared: of each panel its kind, its arguments, its height (inches, or inches of the frame and of each line),
            and over: it is drawn on the panel before.
        row: whose panels they are.
        kinds: beside those of ``KINDS``: functions of the other arguments, which give a panel, or panels.
        heights: by kind, of those that declare none.
    """
    known, found = {**KINDS, **kinds}, list[tuple[Panel, Height]]()
    for one in declared:
        kind, height = one["kind"], one.get("height", heights.get(one["kind"], HEIGHT))
        if isinstance(height, list):
            height = height[0] + height[1] * len(row.lines)
        made = known[kind](**{key: one[key] for key in one.keys() - {"kind", "height", "over"}})
        if one.get("over"):
            before, height = found.pop()
            made = over(before, made)
        found += [(panel, height) for panel in (made if isinstance(made, list) else [made])]
    return found


class _Words(string.Formatter):
    """Format strings for figures: one that is missing is a dash, and MB is a unit."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """See ``string.Formatter``."""
        if value is None:
            return "-" if format_spec else ""
        return f"{value / 1e6:.3g} MB" if format_spec == "MB" else str(super().format_field(value, format_spec))


def said(text: str, figures: Mapping[str, Any]) -> str:
    """Figures in words; ``text`` is a format string."""
    return _Words().vformat(text, (), figures)
