"""``sakiyomi bench``: side-by-side measurements on this machine, and models to measure on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from sakiyomi.cli import spec
from sakiyomi.cli.common import JsonOption, command
from sakiyomi.cli.rows import PlotOption, Shown, show
from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.config import BenchConfig, InflateConfig
from sakiyomi.evaluation.bench.figures.config import ReportConfig
from sakiyomi.evaluation.bench.long.config import LongConfig


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
    command(
        own,
        None,
        BenchConfig,
        PlotOption,
        JsonOption,
        help="Measure speed side by side.\n\nInterleaved laps, medians, equal outputs checked in the same run. Of our "
        "own contenders: draft, score and rest in ms a round; KV, keys and values of the largest pass; bw, what "
        "decoding passes of the target read, as a share of the memory's measured speed.",
    )(bench)
    command(
        own,
        "inflate",
        InflateConfig,
        JsonOption,
        help="Write a larger model that computes what a small one does.\n\nReal acceptance at a real size: new layers, "
        "heads and units are random inside and add nothing. It is checked before it is there.",
    )(inflate)
    command(
        own,
        "long",
        LongConfig,
        PlotFolderOption,
        JsonOption,
        help="Compare cache systems on long contexts.\n\nEvery system answers the same prompts: right answers, keys "
        "and values, peak memory, speed. Then how memory grows with the length; of books perplexity and agreement with "
        "the full cache; of turns one conversation that grows.",
    )(long)
    spec.register(own)
    command(
        own,
        "report",
        ReportConfig,
        JsonOption,
        help="Make a page of figures from measurements here.\n\nTime by model size and temperature, ranks, alpha by "
        "draft, trees, rounds, the formulas beside measured points, Medusa, accuracy by memory, predictions: one HTML "
        "page that needs no other file, and pictures. Numbers are kept; a run that was broken off goes on.",
    )(report)
    app.add_typer(own, name="bench")


def bench(config: BenchConfig, picture: PlotOption, output: JsonOption) -> None:
    """Run the command."""
    from sakiyomi.cli.output import emit_json, progress, quiet

    with progress("loading") as status:
        from sakiyomi.engine import machine
        from sakiyomi.evaluation.bench import plot, suites

        if picture.plot is not None:
            if config.rows and suites.TABLES.issuperset(config.rows):
                raise InputError(f"plot has nothing to draw of {', '.join(config.rows)}; ask for another row too")
            plot.check(picture.plot)
        quiet()
        rows = suites.run(config, Shown(status))
        conditions = machine.conditions()
        done = show(rows, conditions, status)
    if output.json:
        emit_json({"conditions": conditions, "rows": [row.to_dict() for row in done]})
    if picture.plot is not None:
        plot.draw(done, picture.plot, conditions)
    if any(row.error is not None for row in done):
        raise typer.Exit(1)


def long(config: LongConfig, pictures: PlotFolderOption, output: JsonOption) -> None:
    """Run the command."""
    from sakiyomi.cli.output import emit_json, progress, quiet

    with progress("loading") as status:
        from sakiyomi.engine import machine
        from sakiyomi.evaluation.bench.long import plot
        from sakiyomi.evaluation.bench.long.run import run

        if pictures.plot is not None:
            plot.check(pictures.plot)
        quiet()
        rows = run(config, Shown(status), pictures=pictures.plot)
        conditions = machine.conditions()
        done = show(rows, conditions, status)
    if output.json:
        emit_json({"conditions": conditions, "rows": [row.to_dict() for row in done]})
    if pictures.plot is not None:
        plot.draw(done, pictures.plot, conditions)
    if any(row.error is not None for row in done):
        raise typer.Exit(1)


def report(config: ReportConfig, output: JsonOption) -> None:
    """Run the command."""
    from sakiyomi.cli.output import emit_json, note, progress, quiet, stdout

    place = f"{config.out}/index.html"
    try:
        with progress("loading") as status:
            from sakiyomi.engine import machine
            from sakiyomi.evaluation.bench.figures.run import run

            quiet()
            rows = run(config, Shown(status))
            conditions = machine.conditions()
            done = show(rows, conditions, status)
    except KeyboardInterrupt:
        if Path(place).is_file():
            note(f"what was measured until now is on {place}; the same command goes on with the rest")
        raise
    stdout().out(f"the page is {place}", highlight=False)
    if output.json:
        emit_json({"conditions": conditions, "page": place, "rows": [row.to_dict() for row in done]})
    if any(row.error is not None for row in done):
        raise typer.Exit(1)


def inflate(config: InflateConfig, output: JsonOption) -> None:
    """Run the command."""
    from sakiyomi.cli.output import emit_json, progress, quiet, stdout

    with progress("loading") as status:
        from sakiyomi.core.memory import readable
        from sakiyomi.evaluation.bench.inflate import inflate as run

        quiet()
        found = run(config, Shown(status))
    console = stdout()
    lines = [
        f"{found['folder']}: the function of {found['from']} at {found['parameters'] / 1e6:.0f}M parameters, "
        f"{readable(found['bytes'])}, made in {found['seconds']:.0f} s",
        f"  {found['layers']} layers, hidden size {found['hidden_size']}, {found['heads']} heads, {found['kv_heads']} "
        f"key heads, {found['intermediate_size']} MLP units",
        f"  checked in float32: logits differ by {found['largest_logit_difference']:.2g} at most, "
        f"{found['equal_greedy_tokens']} of {found['equal_greedy_tokens']} greedy tokens are equal; random activations "
        f"reach {found['random_to_real_activations']:.2f} of the real ones",
    ]
    for line in lines:
        console.out(line, highlight=False)
    if output.json:
        emit_json(found)
