"""How figures are declared: panels of curves, bars and tables, drawn in a theme from the lines of a row.

A painter is ``(row, theme) -> Figure``, a panel is ``(axes, row, theme) -> None``; ``stack`` makes a painter of panels.
Needs matplotlib when it draws; imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.evaluation.bench.draw import NARROW, WIDTH, blank, bordered, curve, drawn, foot, save
from sakiyomi.evaluation.bench.report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DPI = 180
MARKS = "os^DvPX"
HEIGHT = 3.2
"""Inches of a panel that does not say otherwise."""
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Theme:
    """Colours of a picture.

    Attributes:
        name: of the theme.
        paper, ink, faint: background, text and axes, grid and notes.
        colours: of curves and bars, told apart in either theme, also without seeing red and green.
    """

    name: str
    paper: str
    ink: str
    faint: str
    colours: tuple[str, ...]

    def settings(self) -> Any:
        """For matplotlib's ``rc_context``, whose type of keys is its own."""
        from cycler import cycler

        inks = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "axes.edgecolor")
        papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
        sizes = {"font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9, "legend.frameon": False}
        found: dict[str, Any] = dict.fromkeys(inks, self.ink) | dict.fromkeys(papers, self.paper) | sizes
        return found | {"grid.color": self.faint, "axes.prop_cycle": cycler(color=self.colours)}


LIGHT = Theme(
    "light",
    "#ffffff",
    "#1b1f24",
    "#8a929c",
    ("#1f4e8c", "#c2622d", "#2e7d4f", "#8b3f86", "#9a7a12", "#1f8a8a", "#555555"),
)
DARK = Theme(
    "dark",
    "#14181d",
    "#e3e7ec",
    "#7d8792",
    ("#7fb2ee", "#f0a06a", "#7fcf9c", "#d695d2", "#e0c25c", "#6fd0d0", "#b5bcc4"),
)
THEMES = (LIGHT, DARK)

Painter = Callable[[Row, Theme], "Figure"]
Panel = Callable[[Any, Row, Theme], None]
Height = float | Callable[[Row], float]


Figures = dict[str, tuple[Callable[[Any], Row], Painter]]
"""Figures by name: what measures each, called with what the figures share, and what draws the row."""


def themed(theme: Theme, salt: str) -> Any:
    """A context in which matplotlib has the theme's colours; ``salt`` tells the names inside an SVG from others'."""
    from matplotlib import rc_context

    # Glyphs as outlines would be most of the file.
    return rc_context(theme.settings() | {"svg.fonttype": "none", "svg.hashsalt": salt})


def picture(paint: Painter, row: Row, theme: Theme, kind: str = "png", salt: str = "") -> bytes:
    """A row as PNG or SVG; an SVG keeps its words as words and is the same for the same numbers."""
    with themed(theme, salt):
        return drawn(paint(row, theme), kind, DPI)


def stack(
    *panels: Panel, height: Height | Sequence[Height] = HEIGHT, below: bool = False, width: float = NARROW
) -> Painter:
    """A painter of panels, one below the other.

    Args:
        panels: from top to bottom.
        height: inches of each panel, or of the panels one by one; a function is given the row.
        below: one legend for all panels stands below them.
        width: inches.
    """

    def paint(row: Row, theme: Theme) -> Figure:
        given = height if isinstance(height, Sequence) else [height] * len(panels)
        inches = [one(row) if callable(one) else one for one in given]
        figure = blank(width, sum(inches))
        found = bordered(figure.subplots(len(panels), 1, squeeze=False, height_ratios=inches).flat)
        for axes, panel in zip(found, panels, strict=True):
            panel(axes, row, theme)
        if below:
            legend_once(figure, found, "lower", 2)
        return figure

    return paint


def drawing(
    path: str | Path,
    parts: Sequence[tuple[Panel, Row, Height]],
    conditions: Mapping[str, Any] | None = None,
    *,
    width: float = WIDTH,
    legend: bool = False,
) -> None:
    """Write panels, each about a row of its own, into one light picture.

    Args:
        path: ends in .png or .svg.
        parts: panel, row and inches, from top to bottom.
        conditions: stand below; None: none do.
        width: inches.
        legend: one legend for all panels stands above them.

    Raises:
        LoadError: the file cannot be written.
    """
    panels = [partial(_on, panel, row) for panel, row, _ in parts]
    inches = [height(row) if callable(height) else height for _, row, height in parts]
    with themed(LIGHT, "plot"):
        figure = stack(*panels, height=inches, width=width)(parts[0][1], LIGHT)
        if legend:
            legend_once(figure, figure.axes, "upper", 4)
        if conditions is not None:
            foot(figure, conditions)
        save(figure, path)


def _on(panel: Panel, row: Row, axes: Any, _: Row, theme: Theme) -> None:
    """A panel about a row of its own."""
    panel(axes, row, theme)


def legend_once(figure: Figure, panels: Sequence[Any], place: str, columns: int) -> None:
    """One legend for all panels, each name once."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    look: dict[str, Any] = {"loc": f"outside {place} center", "ncols": columns, "frameon": False, "fontsize": 8}
    figure.legend(list(found.values()), list(found), **look)


def curves(
    x: str,
    ys: Mapping[str, str | tuple[str, str]],
    *,
    of: Callable[[Lines], Lines] = lambda lines: lines,
    by: str | None = None,
    level: float | None = None,
    mark: float | None = None,
    legend: str | None = None,
    first: int = 0,
    stroke: str = "-",
    **look: Any,
) -> Panel:
    """A panel of curves against one figure.

    Args:
        x: name of the figure below.
        ys: names of the figures beside, each with its label, or with label and style.
        of: chooses and sorts lines.
        by: draw one curve for each value of this key, of the only figure of ``ys``.
        level: where a faint line crosses the panel.
        mark: where a dashed line stands upright.
        legend: its place.
        first: of the theme's colours.
        stroke: of curves without a style of their own; "": points alone.
        look: given to ``axes.set``.
    """

    def panel(axes: Any, row: Row, theme: Theme) -> None:
        lines = of(row.lines)
        if by is None:
            parts = [(y, said, lines) for y, said in ys.items()]
        else:
            (y,) = ys
            names = dict.fromkeys(line[by] for line in lines)
            parts = [(y, name, [line for line in lines if line[by] == name]) for name in names]
        for at, (y, said, own) in enumerate(parts, start=first):
            label, style = said if isinstance(said, tuple) else (said, f"{MARKS[at % len(MARKS)]}{stroke}")
            colour = theme.colours[at % len(theme.colours)]
            curve(axes, own, x, y, style, color=colour, label=label or None, markersize=5)
        if level is not None:
            axes.axhline(level, color=theme.faint, linewidth=1)
        if mark is not None:
            axes.axvline(mark, color=theme.colours[1], linestyle="--", linewidth=1)
        axes.set(**look)
        if legend is not None:
            axes.legend(loc=legend)

    return panel


def bars(key: str, *, label: str, colour: int | None = 0, of: str = "name", text: str = ".2f") -> Panel:
    """A panel of horizontal bars, one a line, the first on top, each with its value behind it.

    Args:
        key: of the value.
        label: below the axis.
        colour: of the theme's; None: the first bar has the third one, the others the second.
        of: key of the names; lines that have none are left out.
        text: how a value is written.
    """

    def panel(axes: Any, row: Row, theme: Theme) -> None:
        lines = having(row.lines, of)
        for at, line in enumerate(lines):
            value = line[key] or 0.0
            axes.barh(at, value, height=0.6, color=theme.colours[(2 if not at else 1) if colour is None else colour])
            axes.text(value, at, f" {value:{text}}", va="center", fontsize=9)
        axes.set_yticks(range(len(lines)), [line[of].replace("+", "\n+ ") for line in lines], fontsize=8)
        axes.set(ylim=(len(lines) - 0.4, -0.6), xlabel=label)
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")

    return panel


def grouped(
    axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float | None]], colours: Sequence[str]
) -> list[list[float]]:
    """Draw vertical bars in groups, side by side: a group a name, a bar a series.

    Args:
        axes: takes them.
        names: of the groups.
        series: a value each group; None: no bar.
        colours: of the series; of more series than colours they are repeated, paler.

    Returns:
        Where the bars of each series stand.
    """
    width = 0.84 / max(len(series), 1)
    found = []
    for at, (label, values) in enumerate(series.items()):
        xs = [place + (at - (len(series) - 1) / 2) * width for place in range(len(names))]
        alpha = 1 - 0.4 * min(at // len(colours), 1)
        heights = [value or 0.0 for value in values]
        axes.bar(xs, heights, 0.92 * width, color=colours[at % len(colours)], alpha=alpha, label=label or None)
        found.append(xs)
    ticks(axes, "x", names, rotation=20 if len(names) > 8 else 0)
    axes.grid(visible=False, axis="x")
    return found


def heat(axes: Any, cells: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], **look: Any) -> None:
    """Draw a table of shaded cells, the first row on top."""
    axes.pcolormesh(cells, linewidth=0.4, **look)
    ticks(axes, "x", columns, shift=0.5, fontsize=8)
    ticks(axes, "y", rows, shift=0.5, fontsize=8)
    axes.set(ylim=(len(rows), 0))
    axes.grid(visible=False)


def ticks(axes: Any, which: str, names: Iterable[str], *, shift: float = 0.0, **look: Any) -> None:
    """Names along an axis in the place of numbers."""
    names = list(names)
    getattr(axes, f"set_{which}ticks")([at + shift for at in range(len(names))], names, **look)


def having(lines: Lines, key: str) -> list[Any]:
    """Lines that have a figure, of a row whose lines are about two things."""
    return [line for line in lines if key in line]


def drawable(text: str) -> str:
    """Text for a picture: no line breaks, no formula between dollars, and no letter that the font does not have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties()))
    shown = "".join(letter if known.get_char_index(ord(letter)) else "?" for letter in text)
    return shown.replace("$", r"\$")
