"""What the commands below ``bench`` share: progress, tables when they are done, where a picture goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import cell, is_number, progress, say, table
from sakiyomi.core.files import whole_file
from sakiyomi.evaluation.bench.config import Note
from sakiyomi.evaluation.bench.report import Row, condition_line

Draw = Callable[[Sequence[Row], str, Mapping[str, Any]], object]
Started = tuple[Iterable[Row], Draw | None]
"""Rows, which are measured one after the other, and a function that draws them."""


@dataclass(frozen=True)
class PlotOption:
    """Where the picture goes.

    Attributes:
        plot: draw the rows into this .png or .svg: bars of speeds, curves of the sweep (needs matplotlib).
    """

    plot: str | None = None

    def check(self) -> None:
        """Refuse before any measuring what could not be drawn after it."""
        if self.plot is not None:
            from sakiyomi.evaluation.bench.plot import check

            check(self.plot)


@dataclass(frozen=True)
class PlotFolderOption(PlotOption):
    """Where the pictures go.

    Attributes:
        plot: folder for pictures of the rows (needs matplotlib); made if it is not there.
    """

    def check(self) -> None:
        """See ``PlotOption``."""
        if self.plot is not None:
            from sakiyomi.evaluation.bench.long.plot import check

            check(self.plot)


@dataclass(frozen=True)
class MarkdownOption:
    """Where the tables go as a page.

    Attributes:
        markdown: write the tables, with notes and conditions, into this .md file too.
    """

    markdown: str | None = None

    def write(self, rows: Sequence[Row], conditions: Mapping[str, Any]) -> None:
        """Write the page, if it is wanted.

        Raises:
            LoadError: it cannot be written.
        """
        if self.markdown is not None:
            with whole_file(Path(self.markdown).expanduser(), "name another file with --markdown") as fresh:
                fresh.write_text("\n".join([*map(markdown, rows), condition_line(conditions), ""]), encoding="utf-8")


def measured(
    start: Callable[[Note], Started],
    output: JsonOption,
    picture: PlotOption | None = None,
    written: MarkdownOption | None = None,
    *,
    doing: str = "loading",
    conditions: Mapping[str, Any] | None = None,
    **more: str,
) -> None:
    """Run a command that gives rows: show each when it is done, then write the JSON line, then draw.

    Args:
        start: begins the work and gives the rows, with what draws them.
        output: whether a JSON line is wanted.
        picture: where the picture goes; it is refused before the work begins.
        written: whether a Markdown page is wanted.
        doing: what is shown before the first row.
        conditions: under which all rows were measured; this machine's if none are given.
        more: further values of the JSON line; each is shown as "the KEY is VALUE" too.

    Raises:
        typer.Exit: with code 1, if a row has failed.
    """
    if picture is not None:
        picture.check()
    with progress(doing) as status:
        from sakiyomi.engine import machine

        rows, draw = start(status.update)
        if conditions is None:
            conditions = machine.conditions()
        done = show(rows, conditions, status)
    say(*(f"the {key} is {value}" for key, value in more.items()))
    output.emit({"conditions": dict(conditions), **more, "rows": [row.to_dict() for row in done]})
    if written is not None:
        written.write(done, conditions)
    if picture is not None and picture.plot is not None and draw is not None:
        draw(done, picture.plot, conditions)
    if any(row.error is not None for row in done):
        raise typer.Exit(1)


def markdown(row: Row) -> str:
    """A row as a section of a Markdown page."""
    lines = row.table()
    names = list(lines[0]) if lines else []
    right = {name for line in lines for name, value in line.items() if is_number(value)}
    head = [names, ["---:" if name in right else "---" for name in names]] if names else []
    cells = [*head, *([cell(line[name]) for name in names] for line in lines)]
    below = [*([row.error] if row.error is not None else []), *row.notes, condition_line(row.conditions)]
    table = "\n".join(f"| {' | '.join(part)} |" for part in cells)
    return "\n".join([f"## {row.name}: {row.title}", "", table, "", *(f"- {text}" for text in below if text), ""])


def show(rows: Iterable[Row], conditions: Mapping[str, Any], status: Any) -> list[Row]:
    """Each row's table when it is done, with its notes and conditions; all of them come back."""
    status.stop()
    say(condition_line(conditions))
    status.start()
    done = []
    for row in rows:
        done.append(row)
        # The spinner and the table may share a screen.
        status.stop()
        say("")
        table(row.table(), title=f"{row.name}: {row.title}")
        below = [*([row.error] if row.error is not None else []), *row.notes, condition_line(row.conditions)]
        say(*(f"  {text}" for text in below))
        status.start()
    return done
