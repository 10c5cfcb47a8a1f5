"""``sakiyomi bench spec``: drafters by kind of question, and the files in which that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from sakiyomi.cli.common import JsonOption, add_command
from sakiyomi.cli.rows import PlotOption, measured, show
from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.config import Note
from sakiyomi.evaluation.bench.spec.config import CompareConfig, MergeConfig, SpecConfig

if TYPE_CHECKING:
    from sakiyomi.evaluation.bench.report import Row


def register(app: typer.Typer) -> None:
    """Add the command, and those below it."""
    own = typer.Typer(rich_markup_mode=None)
    add_command(own, spec, name=None)
    add_command(own, compare)
    add_command(own, merge)
    app.add_typer(own, name="spec")


def spec(config: SpecConfig, picture: PlotOption, output: JsonOption) -> None:
    """Compare drafters on questions of several kinds, as Spec-Bench does.

    Greedy, one request at a time, everyone by turns on each question; every answer is compared with the plain one.
    Speed-ups are over plain decoding beside it, the prompt's pass included; decode is the speed-up behind the prompt,
    tau the mean accepted tokens.
    """

    def start(note: Note) -> Iterable[Row]:
        from sakiyomi.evaluation.bench.spec.run import run

        _check(picture)
        return run(config, note)

    measured(start, output, _painter(picture))


def _check(picture: PlotOption) -> None:
    from sakiyomi.evaluation.bench import plot

    if picture.plot is not None:
        plot.check(picture.plot)


def _painter(picture: PlotOption) -> Callable[[Sequence[Row], Mapping[str, Any]], None] | None:
    """Draws the first row; None where no picture is wanted."""

    def draw(rows: Sequence[Row], conditions: Mapping[str, Any]) -> None:
        from sakiyomi.evaluation.bench.spec import plot

        plot.draw(rows[0], str(picture.plot), conditions)

    return None if picture.plot is None else draw


def compare(config: CompareConfig, output: JsonOption) -> None:
    """Put result files side by side.

    On the questions and drafters that all of them have: another machine, another version, other settings.
    """
    from sakiyomi.cli.output import progress
    from sakiyomi.evaluation.bench.spec.results import Results
    from sakiyomi.evaluation.bench.spec.table import compared

    with progress("reading") as status:
        several = [Results.read(path) for path in config.files]
        row = compared(several)
        show([row], {}, status)
    output.emit({"files": list(config.files), "rows": [row.to_dict()]})


def merge(config: MergeConfig, picture: PlotOption, output: JsonOption) -> None:
    """Show result files as one table, and write them into one file.

    Parts of one measurement: other questions, other drafters, the same settings and machine. With one file its table
    is shown again.
    """
    from pathlib import Path

    from sakiyomi.evaluation.bench.spec.results import Results, join
    from sakiyomi.evaluation.bench.spec.table import rows

    _check(picture)
    if config.out is not None and Path(config.out).expanduser().exists():
        raise InputError(f"out is {config.out!r}, which is there already; name a new file")
    joined = join([Results.read(path) for path in config.files])
    tables = rows(joined)
    if config.out is not None:
        joined.path = Path(config.out).expanduser()
        joined.write()
    measured(lambda note: tables, output, _painter(picture), doing="reading", conditions=joined.conditions)
