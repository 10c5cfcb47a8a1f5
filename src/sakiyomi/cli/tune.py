"""``sakiyomi tune``: sizes that are fastest on this machine."""

from __future__ import annotations

import typer

from sakiyomi.cli.common import JsonOption, command
from sakiyomi.medusa.tuned import TuneConfig


def register(app: typer.Typer) -> None:
    """Add the commands."""
    own = typer.Typer(
        help="Find the sizes of drafts that are fastest on this machine.", no_args_is_help=True, rich_markup_mode=None
    )
    command(
        own,
        "medusa",
        TuneConfig,
        JsonOption,
        help="Search the tree of Medusa heads that is fastest here.\n\nThe rank of what came is measured for each head "
        "on what the target answers to held-out prompts; heads x first guesses x nodes are compared by these and by "
        "measured passes. The result is kept beside the heads, and used from then on.",
    )(medusa)

    @own.callback()
    def _group() -> None:
        """A callback keeps `tune` a group of commands even while it has one."""

    app.add_typer(own, name="tune")


def medusa(config: TuneConfig, output: JsonOption) -> None:
    """Run the command."""
    from sakiyomi.cli.output import emit_json, progress, quiet, stdout, table

    with progress("loading") as status:
        from sakiyomi.medusa.search import tune

        quiet()
        found = tune(config, status.update)
    console = stdout()
    best, measured = found["best"], found["measured"]
    table(_shown(found["table"], best), title="heads x first guesses (top_k) x nodes")
    console.out()
    table(
        [
            {"head": number, **{f"top {top}": sum(chances[:top]) for top in (1, 2, 3, 5, 10)}}
            for number, chances in enumerate(found["accuracies"], start=1)
        ],
        title="how often the first guesses of a head hold the token that came",
    )
    console.out()
    table([{"way": name, **measured[name]} for name in ("plain", "fixed", "default")], title="measured")
    facts = found["conditions"]
    lines = [
        f"best: {best['heads']} heads, the first {best['top_k']} guesses of each, {best['nodes']} nodes: tau "
        f"{best['tau']:.2f}, {best['speedup']:.2f} times plain"
        if best["nodes"]
        else "plain decoding is fastest here: these heads do not pay",
        f"all heads take {facts['heads_ms']:.2f} ms a round; {measured['equal']} of {measured['texts']} texts are equal"
        + ("" if facts["dtype"] == "float32" else f" ({facts['dtype']} rounds passes of other sizes differently)"),
        f"kept in {found['file']}",
    ]
    for line in lines:
        console.out(line, highlight=False)
    if output.json:
        emit_json(found)


def _shown(rows: list[dict[str, object]], best: dict[str, object]) -> list[dict[str, object]]:
    """The best width of every number of heads and nodes, so that the table can be read; JSON has all."""
    kept: dict[tuple[object, object], dict[str, object]] = {}
    for row in rows:
        key = (row["heads"], row["nodes"])
        if key not in kept or row["tokens_per_second"] > kept[key]["tokens_per_second"]:  # type: ignore[operator]
            kept[key] = row
    return [{**row, "": "<- best" if row == best else None} for row in kept.values()]
