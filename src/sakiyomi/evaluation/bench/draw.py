"""Begins and writes the pictures of all benchmarks. Needs matplotlib; imports no torch."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.evaluation.bench.report import condition_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BAR", "BASELINE", "FOOT", "MARK", "NARROW", "WIDTH", "blank", "bordered", "drawn", "need_matplotlib"]
__all__ += ["plain_numbers", "save", "small"]

WIDTH, NARROW = 9.0, 5.6
"""Inches; narrow pictures are for phones, where a point of the picture is about a pixel."""
# Dark enough to be read when the picture is shown small; the baseline steps back.
BAR, BASELINE, MARK = "#1f4e8c", "#9aa7b8", "#c2452d"
FOOT: dict[str, Any] = {"fontsize": 7, "color": "#555555"}


def need_matplotlib(name: str) -> None:
    """Refuse what could not be drawn.

    Args:
        name: of the parameter that asks for a picture.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UnsupportedError(f"{name} needs matplotlib, which is not installed: pip install matplotlib") from None


def blank(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def bordered(some: Iterable[Any]) -> list[Any]:
    """Axes with a faint grid, and without the upper and right side of the frame."""
    found = list(some)
    for axes in found:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return found


def small(conditions: Mapping[str, Any]) -> str:
    """Conditions for the margin of a picture."""
    return textwrap.fill(condition_line(conditions), 150)


def drawn(figure: Any, kind: str, dpi: int) -> bytes:
    """A figure as a file.

    Args:
        figure: to be drawn.
        kind: png or svg; an SVG is as small as it can be without a look that is another one: no comments and line
            breaks, coordinates to a hundredth of a point.
        dpi: of a PNG.
    """
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None)
    if kind != "svg":
        return file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", file.getvalue().decode(), flags=re.DOTALL)
    text = re.sub(r'="[^"]*"', lambda part: re.sub(r"(\.\d\d)\d+", r"\1", part[0]), text)
    return re.sub(r"\s*\n\s*", " ", text).encode()


def save(figure: Any, path: str | Path, other: str = "--plot") -> None:
    """Write a figure.

    Args:
        figure: to be written.
        path: of the file.
        other: what to choose anew where it cannot be written.

    Raises:
        LoadError: the file cannot be written.
    """
    try:
        Path(path).write_bytes(drawn(figure, Path(path).suffix[1:].lower(), dpi=130))
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error}; choose another {other}") from None


def plain_numbers(axes: Any, *_: Any) -> None:
    """Numbers in place of powers of ten at a logarithmic vertical axis, and no more ticks than have one."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
