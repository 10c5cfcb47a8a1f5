"""``sakiyomi bench``: side-by-side measurements on this machine, and models to measure on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sakiyomi.cli import spec
from sakiyomi.cli.common import JsonOption, add_command
from sakiyomi.cli.rows import PlotOption, measured
from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.config import BenchConfig, InflateConfig, Note
from sakiyomi.evaluation.bench.figures.config import ReportConfig
from sakiyomi.evaluation.bench.long.config import LongConfig

if TYPE_CHECKING:
    from sakiyomi.evaluation.bench.report import Row


@dataclass(frozen=True)
class PlotFolderOption:
    """Where the pictures go.

    Attributes:
        plot: folder for pictures of the rows (needs matplotlib); made if it is not there.
    """

    plot: str | None = None


def register(app: typer.Typer) -> None:
    """Add the command, and the one below it."""
    own = typer.Typer(rich_markup_mode=None)
    add_command(own, bench, name=None)
    add_command(own, inflate)
    add_command(own, long)
    spec.register(own)
    add_command(own, report)
    app.add_typer(own, name="bench")


def bench(config: BenchConfig, picture: PlotOption, output: JsonOption) -> None:
    """Measure speed side by side.

    Interleaved laps, medians, equal outputs checked in the same run. Of our own contenders: draft, score and rest in
    ms a round; KV, keys and values of the largest pass; bw, what decoding passes of the target read, as a share of the
    memory's measured speed.
    """

    def start(note: Note) -> Iterable[Row]:
        from sakiyomi.evaluation.bench import plot, suites

        if picture.plot is not None:
            if config.rows and suites.TABLES.issuperset(config.rows):
                raise InputError(f"plot has nothing to draw of {', '.join(config.rows)}; ask for another row too")
            plot.check(picture.plot)
        return suites.run(config, note)

    def draw(rows: Sequence[Row], conditions: Mapping[str, Any]) -> None:
        from sakiyomi.evaluation.bench import plot

        plot.draw(rows, str(picture.plot), conditions)

    measured(start, output, None if picture.plot is None else draw)


def long(config: LongConfig, pictures: PlotFolderOption, output: JsonOption) -> None:
    """Compare cache systems on long contexts.

    Every system answers the same prompts: right answers, keys and values, peak memory, speed. Then how memory grows
    with the length; of books perplexity and agreement with the full cache; of turns one conversation that grows.
    """

    def start(note: Note) -> Iterable[Row]:
        from sakiyomi.evaluation.bench.long import plot
        from sakiyomi.evaluation.bench.long.run import run

        if pictures.plot is not None:
            plot.check(pictures.plot)
        return run(config, note, pictures=pictures.plot)

    def draw(rows: Sequence[Row], conditions: Mapping[str, Any]) -> None:
        from sakiyomi.evaluation.bench.long import plot

        plot.draw(rows, str(pictures.plot), conditions)

    measured(start, output, None if pictures.plot is None else draw)


def report(config: ReportConfig, output: JsonOption) -> None:
    """Make a page of figures from measurements here.

    Time by model size and temperature, ranks, alpha by draft, trees, rounds, the formulas beside measured points,
    Medusa, accuracy by memory, predictions: one HTML page that needs no other file, and pictures. Numbers are kept; a
    run that was broken off goes on.
    """

    def start(say: Note) -> Iterable[Row]:
        from sakiyomi.evaluation.bench.figures.run import run

        return run(config, say)

    page = f"{config.out}/index.html"
    try:
        measured(start, output, page=page)
    except KeyboardInterrupt:
        from sakiyomi.cli.output import note

        if Path(page).is_file():
            note(f"what was measured until now is on {page}; the same command goes on with the rest")
        raise


def inflate(config: InflateConfig, output: JsonOption) -> None:
    """Write a larger model that computes what a small one does.

    Real acceptance at a real size: new layers, heads and units are random inside and add nothing. It is checked before
    it is there.
    """
    from sakiyomi.cli.output import progress, quiet, say

    with progress("loading") as status:
        from sakiyomi.core.memory import readable
        from sakiyomi.evaluation.bench.inflate import inflate as run

        quiet()
        found = run(config, status.update)
    lines = [
        f"{found['folder']}: the function of {found['from']} at {found['parameters'] / 1e6:.0f}M parameters, "
        f"{readable(found['bytes'])}, made in {found['seconds']:.0f} s",
        f"  {found['layers']} layers, hidden size {found['hidden_size']}, {found['heads']} heads, {found['kv_heads']} "
        f"key heads, {found['intermediate_size']} MLP units",
        f"  checked in float32: logits differ by {found['largest_logit_difference']:.2g} at most, "
        f"{found['equal_greedy_tokens']} of {found['equal_greedy_tokens']} greedy tokens are equal; random activations "
        f"reach {found['random_to_real_activations']:.2f} of the real ones",
    ]
    say(*lines)
    output.emit(found)
