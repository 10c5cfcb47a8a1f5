"""Rows about sakiyomi's own code, with the flags and tables of `sakiyomi bench`.

    python benchmarks/rows.py --rows passes --rows bookkeeping
    python benchmarks/rows.py --rows exact --target FOLDER --draft model:FOLDER

Rows: bookkeeping (milliseconds a round outside forwards), passes and scoring (of single passes and of trees), plain
(recorded passes against eager ones), never-slower and useless (gamma "auto" beside plain, also with a draft that is
never right), coverage (siblings that the target chooses from), block (block verification beside the ratio rule), exact
(cost and promise of exact=True), lookup and merged (drafts from the text, on texts that repeat their prompt), trees
(against chains of one drafter), selfdraft (a target that drafts for itself), evicted (on an excerpt of its cache, by
the length of the context), heads (every drafter of a target), learning (a draft that learns while it is used, beside
the same without, over many prompts), medusa (heads beside a draft model), batch (eight requests at once), cross (a
draft of another tokenizer, beside transformers), offload (the target is read from the disk at every pass).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from own_rows.batch import batch
from own_rows.block import block
from own_rows.bookkeeping import bookkeeping
from own_rows.common import OwnConfig
from own_rows.cross import cross
from own_rows.drafts import coverage, never_slower, useless
from own_rows.evicted import evicted
from own_rows.exactness import exact
from own_rows.heads import heads
from own_rows.learning import learning
from own_rows.lookup import lookup
from own_rows.medusa import medusa
from own_rows.merged import merged
from own_rows.offload import offload
from own_rows.passes import passes, scoring
from own_rows.plain import plain
from own_rows.trees import selfdraft, trees
from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.rows import PlotOption, Started, measured
from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench import plot, suites
from sakiyomi.evaluation.bench.config import Note
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
    "batch": batch,
    "cross": cross,
    "medusa": medusa,
    "trees": trees,
    "selfdraft": selfdraft,
    "evicted": evicted,
    "heads": heads,
    "learning": learning,
    "offload": offload,
}

NAMED = {"cross", "evicted", "heads", "learning", "medusa"}
"""Rows that run only if they are named: of drafts, heads and texts that have to be given, or that are many."""

RANDOM = {"bookkeeping", "passes", "scoring", "plain"}
"""Rows that make their own models."""

ALONE = RANDOM | {"selfdraft", "evicted", "heads"}
"""Rows that need no draft model."""

TABLES = {"bookkeeping", "passes", "scoring", "coverage", "block", "exact", "learning"}
"""Rows of which nothing can be drawn."""


def _command(config: OwnConfig, picture: PlotOption, output: JsonOption) -> None:
    """Measure parts of sakiyomi side by side.

    Example: python benchmarks/rows.py --rows passes --rows bookkeeping
    """

    def start(note: Note) -> Started:
        if picture.plot is not None and config.rows and TABLES.issuperset(config.rows):
            raise InputError(f"plot has nothing to draw of {', '.join(config.rows)}; ask for another row too")
        wanted = config.rows or tuple(name for name in ROWS if name not in NAMED)
        return suites.run(replace(config, rows=wanted), note, ROWS, ALONE), plot.draw

    measured(start, output, picture)


app = command(_command)

if __name__ == "__main__":
    run(app)
