"""Sections in words, and as one HTML page that needs no other file: pictures, words and tables are in it."""

from __future__ import annotations

import base64
import html
import re
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sakiyomi.evaluation.bench.figures.config import words
from sakiyomi.evaluation.bench.pictures import Painter
from sakiyomi.evaluation.bench.report import Row, condition_line

__all__ = ["Section", "Shown", "page"]


class _Words(string.Formatter):
    """Format strings for figures: one that is missing is a dash, and MB is a unit."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """See ``string.Formatter``."""
        if value is None:
            return "-" if format_spec else ""
        return f"{value / 1e6:.3g} MB" if format_spec == "MB" else str(super().format_field(value, format_spec))


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

    def seen(self, row: Row) -> str:
        """What is to be seen, in words."""
        lines, last = row.lines, row.lines[-1]
        wanted = {**self.where, **({self.same: [last[self.same]]} if self.same else {})}
        own = [line for line in lines if all(line.get(key) in values for key, values in wanted.items())]
        own = [line for line in own if self.needs is None or line.get(self.needs) is not None]
        said = self.join.join(_Words().vformat(self.each, (), line) for line in own) or self.none
        known = {"first": lines[0], "last": last, "lines": lines, "count": len(lines), "said": said}
        return " ".join(_Words().vformat(self.alt, (), known | {"conditions": row.conditions}).split())


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


def page(title: str, sections: Iterable[Shown]) -> str:
    """The whole page.

    Args:
        title: plain text.
        sections: in order.
    """
    sections = list(sections)
    links = "\n".join(f'<li><a href="#{part.name}">{html.escape(part.section.title)}</a></li>' for part in sections)
    frame = string.Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return frame.substitute(title=html.escape(title), links=links, body="\n".join(map(_section, sections)))


def _section(part: Shown) -> str:
    lines = [f'<section id="{part.name}">', f"<h2>{html.escape(part.section.title)}</h2>"]
    lines.append(f"<p>{_prose(part.section.text)}</p>")
    if part.row.error is not None:
        lines.append(f'<p class="skipped">Not measured: {html.escape(part.row.error)}</p>')
    if part.pictures:
        alt = html.escape(part.section.seen(part.row))
        images = {theme: _data(content, part.kind) for theme, content in part.pictures.items()}
        dark = f'<source srcset="{images["dark"]}" media="(prefers-color-scheme: dark)">'
        light = f'<img src="{images["light"]}" alt="{alt}">'
        lines.append(f"<figure><picture>{dark}{light}</picture><figcaption>{alt}</figcaption></figure>")
    notes = "\n".join(f"<li>{html.escape(note)}</li>" for note in part.row.notes)
    lines.append(f'<ul class="small">\n{notes}\n</ul>' if notes else "")
    if part.row.lines:
        lines.append(f'<details><summary>Numbers</summary><div class="wide">{_table(part.row)}</div></details>')
    lines.append(f'<p class="small">Command: <code>{html.escape(part.command)}</code></p>')
    pages = ", ".join(f"<code>docs/articles/{name}.md</code>" for name in _articles(part.name))
    lines.append(f'<p class="small">A figure of {pages}</p>' if pages else "")
    known = condition_line({**part.row.conditions, **part.machine})
    lines.append(f'<p class="small">Conditions: {html.escape(known)}</p>' if known else "")
    return "\n".join([*filter(None, lines), "</section>"])


def _articles(section: str) -> list[str]:
    """Names of the articles that have this figure."""
    return [name for name, one in words()["article"].items() if section in one["sections"]]


def _table(row: Row) -> str:
    table = row.table()
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in table[0])
    body = "\n".join(
        "<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in line.values()) + "</tr>" for line in table
    )
    caption = f'<caption class="small">{html.escape(row.title)}</caption>'
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return html.escape(" ".join(map(str, value)))
    return html.escape(str(value))


def _prose(text: str) -> str:
    """Words between backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _data(content: bytes, kind: str) -> str:
    name = {"png": "png", "svg": "svg+xml"}[kind]
    return f"data:image/{name};base64," + base64.b64encode(content).decode()
