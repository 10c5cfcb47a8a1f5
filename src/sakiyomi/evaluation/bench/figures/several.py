"""Several drafts in one tree (SpecInfer), each alone and all together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.evaluation.bench.figures.alphas import family
from sakiyomi.evaluation.bench.figures.section import Section, Theme, stacked
from sakiyomi.evaluation.bench.figures.work import Work, line_of
from sakiyomi.evaluation.bench.report import Row, race_notes
from sakiyomi.evaluation.bench.runner import Contender, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEVERAL"]

NODES, DEPTH = 12, 4  # of every tree, so that a merged one is no larger than those of its parts


def several(work: Work) -> Row:
    """Greedy trees of as many nodes: by the pair's draft, by others, and by all of them merged."""
    specs = [work.draft, *_others(work)]
    if len(specs) < 2:
        raise UnsupportedError("there is no second draft: give a family of checkpoints with --models")
    names = {spec: spec.partition(":")[0] + ":" + Path(spec.partition(":")[2]).name for spec in specs}
    ways: dict[str, Any] = {"plain": work.engine()}
    ways |= {names[spec]: work.engine(spec) for spec in specs}
    ways["+".join(names.values())] = work.engine("+".join(specs))
    row = work.row("several")
    runs = {name: row.run(way, gamma=DEPTH, nodes=NODES, tree="best-first") for name, way in ways.items()}
    row.warm(runs, work.llm)
    judge = work.pair.judge(work.llm)
    found = row.race([Contender(name, run, judge) for name, run in runs.items()])
    lines = [line_of(standing) | {"A/A": Spread.shown(found)} for standing in found]
    conditions = work.conditions(nodes=NODES, depth=DEPTH, temperature=0)
    return Row("several", "tokens a pass and speed, several drafts in one tree", lines, conditions, race_notes(found))


def _others(work: Work) -> list[str]:
    """Further drafts: the other smaller models of the family, else the target's first layers."""
    config, found = work.config, []
    if config.models is not None:
        known = {Path(name).expanduser().resolve() for name in (config.target, work.draft.removeprefix("model:"))}
        _, *smaller = family(config.models)
        found = [f"model:{folder}" for folder in smaller if folder.resolve() not in known]
    half = int(work.llm.target.config.num_hidden_layers) // 2
    return found or ([f"early-exit:{half}"] if half else [])


def _paint_several(row: Row, theme: Theme) -> Figure:
    figure, (upper, lower) = stacked(2, 0.9 + 0.36 * len(row.lines))
    for axes, key, label, colour in (
        (upper, "tau", "tokens a target pass", theme.colours[0]),
        (lower, "ratio", "speed over plain", theme.colours[1]),
    ):
        for at, line in enumerate(row.lines):
            value = line[key] or 0.0
            axes.barh(at, value, height=0.6, color=colour)
            axes.text(value, at, f" {value:.2f}", va="center", fontsize=9)
        axes.set_yticks(range(len(row.lines)), [line["name"].replace("+", "\n+ ") for line in row.lines], fontsize=8)
        axes.set(ylim=(len(row.lines) - 0.4, -0.6), xlabel=label)
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")
    return figure


def _alt_several(row: Row) -> str:
    said = [
        f"{line['name']} {line['tau']:.2f} tokens a pass"
        + (f", {line['ratio']:.2f} times plain" if line["ratio"] else "")
        for line in row.lines
    ]
    return f"Bars by draft, alone and merged in one tree: {'; '.join(said)}."


SEVERAL = Section(
    "Several drafts in one tree",
    "Several drafts propose, their trees are merged into one, and one pass of the target scores it (SpecInfer, arXiv "
    "2305.09781): `--draft model:A+model:B`. Here every tree has as many nodes, alone and merged. What a second draft "
    "brings in tokens a pass it has to earn in time: both draft one after the other on one processor.",
    several,
    _paint_several,
    _alt_several,
    ("models",),
)
