"""Sections in words, and as one HTML page that needs no other file: pictures, words and tables are in it."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from sakiyomi.evaluation.bench.figures.config import words
from sakiyomi.evaluation.bench.figures.panels import painter
from sakiyomi.evaluation.bench.kinds import said
from sakiyomi.evaluation.bench.pictures import Painter
from sakiyomi.evaluation.bench.plot import plots
from sakiyomi.evaluation.bench.report import Row, condition_line


@dataclass(frozen=True)
class Section:
    """A figure with what is measured for it, and its words; see ``figures.toml``.

    Attributes:
        measure: gives the numbers as a row: everything that is drawn is in its lines. It is called with ``Work``.
        paint: draws the row.
        title: above it.
        text: what is shown, and how it is measured.
        alt, each, join, needs, where, same, none: what is to be seen, in words, from the numbers.
        reads: settings that it depends on beside the common ones.
        numbers: what is in the table, unless what measures it says so itself.
    """

    measure: Callable[[Any], Row]
    paint: Painter
    title: str
    text: str
    alt: str
    each: str = ""
    join: str = ", "
    needs: str | None = None
    where: Mapping[str, list[Any]] = field(default_factory=dict)
    same: str | None = None
    none: str = ""
    reads: tuple[str, ...] = ()
    numbers: str = ""

    @classmethod
    def declared(cls, measure: Callable[[Any], Row], own: Mapping[str, Any]) -> Section:
        """A section as ``figures.toml`` has it."""
        texts = {key: value for key, value in own.items() if key not in ("panels", "below", "plot")}
        panels = own["panels"] if "panels" in own else plots()[own["plot"]][:2]
        return cls(measure, painter(panels, below=own.get("below", False)), **texts)

    def seen(self, row: Row) -> str:
        """What is to be seen, in words."""
        lines, last = row.lines, row.lines[-1]
        wanted = {**self.where, **({self.same: [last[self.same]]} if self.same else {})}
        own = [line for line in lines if all(line.get(key) in values for key, values in wanted.items())]
        own = [line for line in own if self.needs is None or line.get(self.needs) is not None]
        told = self.join.join(said(self.each, line) for line in own) or self.none
        known = {"first": lines[0], "last": last, "lines": lines, "count": len(lines), "said": told}
        return " ".join(said(self.alt, known | {"conditions": row.conditions}).split())


@dataclass(frozen=True)
class Shown:
    """A section on the page.

    Attributes:
        name: of the section, which links to it end in.
        section: its words.
        row: the numbers; its error is shown in the place of a picture.
        command: that measures it again.
        machine: where it was measured.
        pictures: by theme; empty where there is nothing to draw.
        kind: of the pictures, png or svg.
    """

    name: str
    section: Section
    row: Row
    command: str
    machine: Mapping[str, Any]
    pictures: Mapping[str, bytes]
    kind: str = "png"

    def images(self) -> dict[str, str]:
        """The pictures as addresses."""
        kind = {"png": "png", "svg": "svg+xml"}[self.kind]
        return {
            name: f"data:image/{kind};base64,{base64.b64encode(own).decode()}" for name, own in self.pictures.items()
        }

    def articles(self) -> list[str]:
        """Names of the articles that have this figure."""
        return [name for name, one in words()["article"].items() if self.name in one["sections"]]

    def conditions(self) -> str:
        """Under which it was measured."""
        return condition_line({**self.row.conditions, **self.machine})


def page(title: str, sections: Iterable[Shown]) -> str:
    """The whole page.

    Args:
        title: plain text.
        sections: in order.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"cell": _cell, "prose": _prose}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(title=title, sections=list(sections))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _prose(text: str) -> Markup:
    """Words between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
