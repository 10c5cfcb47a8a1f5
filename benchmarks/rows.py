"""Rows about sakiyomi's own code, with the flags and tables of `sakiyomi bench`.

    python benchmarks/rows.py --rows passes --rows bookkeeping
    python benchmarks/rows.py --rows exact --target FOLDER --draft model:FOLDER

Rows: bookkeeping (milliseconds a round outside forwards), passes and scoring (of single passes and of trees), plain
(recorded passes against eager ones), never-slower and useless (gamma "auto" beside plain, also with a draft that is
never right), coverage (siblings that the target chooses from), block (block verification beside the ratio rule), exact
(cost and promise of exact=True), lookup and merged (drafts from the text, on texts that repeat their prompt).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from own_rows.block import block
from own_rows.bookkeeping import bookkeeping
from own_rows.drafts import coverage, never_slower, useless
from own_rows.exactness import exact
from own_rows.lookup import lookup
from own_rows.merged import merged
from own_rows.passes import passes, scoring
from own_rows.plain import plain
from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.rows import PlotOption, Started, measured
from sakiyomi.evaluation.bench import plot, suites
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.report import Row
from scripts import command, run

__all__ = ["ROWS", "app"]

ROWS: dict[str, Callable[[PairRow], Row]] = {
    "bookkeeping": bookkeeping,
    "passes": passes,
    "scoring": scoring,
    "plain": plain,
    "never-slower": never_slower,
    "useless": useless,
    "coverage": coverage,
    "block": block,
    "exact": exact,
    "lookup": lookup,
    "merged": merged,
}

RANDOM = {"bookkeeping", "passes", "scoring", "plain"}
"""Rows that make their own models."""

TABLES = {"bookkeeping", "passes", "scoring", "coverage", "block", "exact"}
"""Rows of which nothing can be drawn."""


def _command(config: BenchConfig, picture: PlotOption, output: JsonOption) -> None:
    """Measure parts of sakiyomi side by side; all rows of this script, if none is named.

    Example: python benchmarks/rows.py --rows passes --rows bookkeeping
    """

    def start(note: Note) -> Started:
        picture.check_rows(config.rows, TABLES)
        return suites.run(replace(config, rows=config.rows or (suites.ALL,)), note, ROWS, RANDOM), plot.draw

    measured(start, output, picture)


app = command(_command)

if __name__ == "__main__":
    run(app)
