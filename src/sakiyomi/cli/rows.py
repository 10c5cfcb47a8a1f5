"""What the commands below ``bench`` share: progress, tables when they are done, where a picture goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sakiyomi.evaluation.bench.config import Note

if TYPE_CHECKING:
    from sakiyomi.evaluation.bench.report import Row

__all__ = ["PlotOption", "Shown", "show"]


@dataclass(frozen=True)
class PlotOption:
    """Where the picture goes.

    Attributes:
        plot: draw the rows into this .png or .svg: bars of speeds, curves of the sweep (needs matplotlib).
    """

    plot: str | None = None


class Shown(Note):
    """Progress beside a spinner."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def __call__(self, text: str) -> None:
        """See ``Note``."""
        self._status.update(text)


def show(rows: Iterable[Row], conditions: Mapping[str, Any], status: Any) -> list[Row]:
    """Each row's table when it is done, with its notes and conditions; all of them come back."""
    from sakiyomi.cli.output import stdout, table
    from sakiyomi.evaluation.bench import report

    console = stdout()
    status.stop()
    console.out(report.condition_line(conditions), highlight=False)
    status.start()
    done = []
    for row in rows:
        done.append(row)
        # The spinner and the table may share a screen.
        status.stop()
        console.out()
        table(row.table(), title=f"{row.name}: {row.title}")
        if row.error is not None:
            console.out(f"  {row.error}", highlight=False)
        for note in row.notes:
            console.out(f"  {note}", highlight=False)
        console.out(f"  {report.condition_line(row.conditions)}", highlight=False)
        status.start()
    return done
