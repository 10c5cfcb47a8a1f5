"""``sakiyomi bench``: side-by-side measurements on this machine."""

from __future__ import annotations

import typer

from sakiyomi.bench.config import BenchConfig, Note
from sakiyomi.cli.common import JsonOption, command


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "bench",
        BenchConfig,
        JsonOption,
        help="Measure speed side by side.\n\nInterleaved laps, medians, equal outputs checked in the same run. Of our "
        "own contenders: draft, score and rest in ms a round; KV, keys and values of the largest pass; bw, what "
        "decoding passes of the target read, as a share of the memory's measured speed.",
    )(bench)


def bench(config: BenchConfig, output: JsonOption) -> None:
    """Run the command."""
    from sakiyomi.cli.output import emit_json, progress, quiet, stdout, table

    with progress("loading") as status:
        from sakiyomi import machine
        from sakiyomi.bench import report, suites

        class Shown(Note):
            def __call__(self, text: str) -> None:
                status.update(text)

        quiet()
        rows = suites.run(config, Shown())
        conditions = machine.conditions()
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
    if output.json:
        emit_json({"conditions": conditions, "rows": [row.to_dict() for row in done]})
    if any(row.error is not None for row in done):
        raise typer.Exit(1)
