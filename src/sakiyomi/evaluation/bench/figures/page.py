"""Sections as one HTML page that needs no other file: pictures, words and tables are in it."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sakiyomi.evaluation.bench.figures.config import articles_of
from sakiyomi.evaluation.bench.pictures import Section
from sakiyomi.evaluation.bench.report import Row, condition_line

__all__ = ["Shown", "page"]

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --code: #f3f5f7 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e3e7ec; --soft: #9aa4af; --line: #343c45; --code: #1d232a }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 46rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1, h2 { line-height: 1.2 }
h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1.5rem }
ul { padding-left: 1.2rem }
a { color: inherit }
figure { margin: 1rem 0 }
img { display: block; width: 100%; max-width: 42rem; height: auto }
figcaption, .small { color: var(--soft); font-size: .875rem }
code { background: var(--code); padding: .1rem .3rem; border-radius: .2rem; overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .2rem .6rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
summary { cursor: pointer }
.skipped { border-left: .25rem solid var(--line); padding-left: .75rem }
""".strip()


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
    body = "\n".join(map(_section, sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>Every figure was measured by the command below it, on the machine that stands beside it. Unfold the numbers for the
table that a picture is drawn from.</p>
<nav aria-label="Figures"><ul>
{links}
</ul></nav>
{body}
</body>
</html>
"""


def _section(part: Shown) -> str:
    lines = [f'<section id="{part.name}">', f"<h2>{html.escape(part.section.title)}</h2>"]
    lines.append(f"<p>{_prose(part.section.text)}</p>")
    if part.row.error is not None:
        lines.append(f'<p class="skipped">Not measured: {html.escape(part.row.error)}</p>')
    if part.pictures:
        alt = html.escape(part.section.alt(part.row))
        images = {theme: _data(content, part.kind) for theme, content in part.pictures.items()}
        dark = f'<source srcset="{images["dark"]}" media="(prefers-color-scheme: dark)">'
        light = f'<img src="{images["light"]}" alt="{alt}">'
        lines.append(f"<figure><picture>{dark}{light}</picture><figcaption>{alt}</figcaption></figure>")
    notes = "\n".join(f"<li>{html.escape(note)}</li>" for note in part.row.notes)
    lines.append(f'<ul class="small">\n{notes}\n</ul>' if notes else "")
    if part.row.lines:
        lines.append(f'<details><summary>Numbers</summary><div class="wide">{_table(part.row)}</div></details>')
    lines.append(f'<p class="small">Command: <code>{html.escape(part.command)}</code></p>')
    pages = ", ".join(f"<code>docs/articles/{name}.md</code>" for name in articles_of(part.name))
    lines.append(f'<p class="small">A figure of {pages}</p>' if pages else "")
    known = condition_line({**part.row.conditions, **part.machine})
    lines.append(f'<p class="small">Conditions: {html.escape(known)}</p>' if known else "")
    return "\n".join([*filter(None, lines), "</section>"])


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
