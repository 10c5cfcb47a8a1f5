"""What a section of the report is, and how its pictures look: narrow, for a phone, once light and once dark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sakiyomi.evaluation.bench.draw import NARROW, drawn, panels
from sakiyomi.evaluation.bench.report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sakiyomi.evaluation.bench.figures.work import Work

__all__ = ["DARK", "LIGHT", "THEMES", "Section", "Theme", "legend_below", "picture", "stacked"]

DPI = 180


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
        return dict.fromkeys(inks, self.ink) | {
            "figure.facecolor": self.paper,
            "axes.facecolor": self.paper,
            "savefig.facecolor": self.paper,
            "grid.color": self.faint,
            "axes.prop_cycle": cycler(color=self.colours),
            "font.size": 10,
            "axes.titlesize": 10,
            "legend.frameon": False,
            "legend.fontsize": 9,
        }


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


@dataclass(frozen=True)
class Section:
    """A figure with what was measured for it.

    Attributes:
        title: above it.
        text: what is shown, and how it was measured.
        measure: gives the numbers as a row: everything that is drawn is in its lines.
        paint: draws the row; matplotlib is set to the theme while it does.
        alt: what is to be seen, in words, from the numbers.
        reads: settings that it depends on beside the common ones.
    """

    title: str
    text: str
    measure: Callable[[Work], Row]
    paint: Callable[[Row, Theme], Figure]
    alt: Callable[[Row], str]
    reads: tuple[str, ...] = ()


def stacked(count: int = 1, height: float = 3.2) -> tuple[Figure, list[Any]]:
    """A figure with so many axes, one below the other."""
    return panels(count, 1, NARROW, count * height)


def legend_below(figure: Figure, axes: Any) -> None:
    """The legend of these axes in two columns below the picture."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


def picture(section: Section, row: Row, theme: Theme, kind: str = "png") -> bytes:
    """The section as PNG or SVG; an SVG keeps its words as words and is the same for the same numbers."""
    from matplotlib import rc_context

    # Glyphs as outlines would be most of the file.
    with rc_context(theme.settings() | {"svg.fonttype": "none", "svg.hashsalt": section.title}):
        return drawn(section.paint(row, theme), kind, DPI)
