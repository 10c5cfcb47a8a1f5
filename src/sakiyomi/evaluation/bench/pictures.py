"""How figures are declared: panels of curves, bars and tables, drawn in a theme from the lines of a row.

A painter is ``(row, theme) -> Figure``, a panel is ``(axes, row, theme) -> None``; ``stack`` makes a painter of panels.
Needs matplotlib when it draws; imports no torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.evaluation.bench.draw import FOOT, NARROW, WIDTH, blank, bordered, drawn, save, small
from sakiyomi.evaluation.bench.report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DPI = 180
MARKS = "os^DvPX"
HEIGHT = 3.2
"""Inches of a panel that does not say otherwise."""
Lines = Sequence[Mapping[str, Any]]
Of = str | Callable[[Lines], Lines] | None


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
    colours: Sequence[str]

    def settings(self) -> Any:
        """For matplotlib's ``rc_context``, whose type of keys is its own."""
        from cycler import cycler

        inks = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "axes.edgecolor")
        papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
        sizes = {"font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9, "legend.frameon": False}
        found: dict[str, Any] = dict.fromkeys(inks, self.ink) | dict.fromkeys(papers, self.paper) | sizes
        return found | {"grid.color": self.faint, "axes.prop_cycle": cycler(color=self.colours)}


_KNOWN = tomllib.loads(Path(__file__).with_name("themes.toml").read_text(encoding="utf-8"))
THEMES = LIGHT, DARK = tuple(Theme(name, **own) for name, own in _KNOWN.items())

Painter = Callable[[Row, Theme], "Figure"]
Panel = Callable[[Any, Row, Theme], None]
Height = float | Callable[[Row], float]


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
            figure.supxlabel(small(conditions), **FOOT)
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


Series = Mapping[str, str | Sequence[str]]
"""Names of figures, each with its label, or with label and style."""


def chosen(lines: Lines, of: Of) -> Lines:
    """The lines that a panel is about.

    Args:
        lines: of a row.
        of: a function of the lines, or the name of a figure that they have; None: all.
    """
    if of is None:
        return lines
    return having(lines, of) if isinstance(of, str) else of(lines)


def parts(lines: Lines, ys: Series, by: str | None) -> list[tuple[str, str, str, Lines]]:
    """Figure, label, style ("": the default one) and lines of each curve, or of each colour of bars."""
    labels = [(y, (said, "") if isinstance(said, str) else said) for y, said in ys.items()]
    if by is None:
        return [(y, label, style, lines) for y, (label, style) in labels]
    ((y, (_, style)),) = labels
    names = dict.fromkeys(line[by] for line in lines)
    return [(y, str(name), style, [line for line in lines if line[by] == name]) for name in names]


def curves(
    x: str,
    ys: Series,
    *,
    of: Of = None,
    by: str | None = None,
    styles: Mapping[str, str] | None = None,
    band: Mapping[str, Sequence[str]] | None = None,
    inverse: float | None = None,
    at: str | None = None,
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
        ys: the figures beside.
        of: the lines, see ``chosen``.
        by: draw one curve for each value of this key, of the only figure of ``ys``.
        styles: of some of the curves, by label.
        band: names of lowest and highest value, by figure; the area between them is shaded.
        inverse: values are drawn as this number divided by them.
        at: key of names that stand below each value of ``x``, in the place of round numbers.
        level: where a faint line crosses the panel.
        mark: where a dashed line stands upright.
        legend: its place.
        first: of the theme's colours.
        stroke: of curves without a style of their own; "": points alone.
        look: given to ``axes.set``.
    """

    def panel(axes: Any, row: Row, theme: Theme) -> None:
        lines = chosen(row.lines, of)
        for place, (y, label, own_style, own) in enumerate(parts(lines, ys, by), start=first):
            style = (styles or {}).get(label) or own_style or f"{MARKS[place % len(MARKS)]}{stroke}"
            colour = theme.colours[place % len(theme.colours)]
            known = [line for line in own if line.get(y) is not None]

            def drawn(name: str, lines: Lines = known) -> list[float]:
                return [inverse / line[name] if inverse else line[name] for line in lines]

            xs = [line[x] for line in known]
            axes.plot(xs, drawn(y), style, color=colour, label=label or None, markersize=5)
            if band is not None:
                axes.fill_between(xs, *map(drawn, band[y]), color=colour, alpha=0.15, linewidth=0)
        if level is not None:
            axes.axhline(level, color=theme.faint, linewidth=1)
        if mark is not None:
            axes.axvline(mark, color=theme.colours[1], linestyle="--", linewidth=1)
        axes.set(**look)
        if at is not None:
            places = {line[x]: line[at] for line in lines}
            axes.set_xticks(list(places), [name if isinstance(name, str) else f"{name:g}" for name in places.values()])
            axes.minorticks_off()
        if legend is not None:
            axes.legend(loc=legend)

    return panel


def grouped(
    axes: Any,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    colours: Sequence[str],
    start: int = 0,
) -> list[list[float]]:
    """Draw vertical bars in groups, side by side: a group a name, a bar a series.

    Args:
        axes: takes them.
        names: of the groups.
        series: a value each group; None: no bar.
        colours: of the series; of more series than colours they are repeated, paler.
        start: where the first group stands.

    Returns:
        Where the bars of each series stand.
    """
    width = 0.84 / max(len(series), 1)
    found = []
    for at, (label, values) in enumerate(series.items()):
        xs = [start + place + (at - (len(series) - 1) / 2) * width for place in range(len(names))]
        alpha = 1 - 0.4 * min(at // len(colours), 1)
        heights = [value or 0.0 for value in values]
        axes.bar(xs, heights, 0.92 * width, color=colours[at % len(colours)], alpha=alpha, label=label or None)
        found.append(xs)
    ticks(axes, "x", names, shift=start, rotation=20 if len(names) > 8 else 0)
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
