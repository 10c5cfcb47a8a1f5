"""The rows of ``sakiyomi bench``, by name. A new row is a function here or in a file of its own, and one line below."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sakiyomi.core.embedded import MEDUSA_HEADS
from sakiyomi.core.errors import InputError, SakiyomiError
from sakiyomi.core.memory import peak_bytes
from sakiyomi.evaluation.bench.block import block
from sakiyomi.evaluation.bench.bookkeeping import bookkeeping
from sakiyomi.evaluation.bench.card import minute
from sakiyomi.evaluation.bench.config import BenchConfig, Note, silent
from sakiyomi.evaluation.bench.contest import peers
from sakiyomi.evaluation.bench.cross import cross
from sakiyomi.evaluation.bench.drafts import coverage, oracle, selfdraft, trees, useless
from sakiyomi.evaluation.bench.evicted import evicted
from sakiyomi.evaluation.bench.exactness import exact
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.heads import heads
from sakiyomi.evaluation.bench.learning import learning
from sakiyomi.evaluation.bench.lookup import lookup
from sakiyomi.evaluation.bench.medusa import medusa, typical
from sakiyomi.evaluation.bench.merged import merged
from sakiyomi.evaluation.bench.never_slower import never_slower
from sakiyomi.evaluation.bench.offload import offload
from sakiyomi.evaluation.bench.passes import passes, scoring
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.speed import batch, dropin, plain, speculative, stories, sweep

__all__ = ["ROWS", "measure", "run"]

ROWS: dict[str, Callable[[PairRow], Row]] = {
    "minute": minute,
    "bookkeeping": bookkeeping,
    "passes": passes,
    "plain": plain,
    "speculative": speculative,
    "stories": stories,
    "batch": batch,
    "sweep": sweep,
    "never-slower": never_slower,
    "trees": trees,
    "coverage": coverage,
    "scoring": scoring,
    "useless": useless,
    "block": block,
    "oracle": oracle,
    "lookup": lookup,
    "merged": merged,
    "offload": offload,
    "exact": exact,
    "peers": peers,
    "cross": cross,
    "selfdraft": selfdraft,
    "evicted": evicted,
    "dropin": dropin,
    "medusa": medusa,
    "heads": heads,
    "typical": typical,
    "learning": learning,
}

ALL = "all"
"""In the place of names of rows."""

TABLES = {"bookkeeping", "passes", "scoring", "coverage", "block", "exact", "learning"}
"""Rows of which nothing can be drawn."""

RANDOM = {"bookkeeping", "passes", "scoring", "plain"}
"""Rows that make their own models."""

ALONE = {"minute", "selfdraft", "evicted", "heads"}
"""Rows of a target without a draft model."""


def measure(name: str, config: BenchConfig, note: Note = silent) -> Row:
    """One row alone."""
    return ROWS[name](PairRow(name, config, note))


def run(config: BenchConfig, note: Note = silent) -> Iterator[Row]:
    """Run the rows that were asked for and give each when it is done; one that fails says so, and the others run.

    Raises:
        InputError, LoadError: a row is not known, or what rows of a pair need is not there; before any work.
    """
    unknown = [name for name in config.rows if name not in (*ROWS, ALL)]
    if unknown:
        raise InputError(f"there is no row {unknown[0]!r}; rows are {', '.join(ROWS)}, and all")
    # With "all", a row runs only if all it needs is known: cross needs a draft of another tokenizer, the rows
    # of heads need heads of this target. Rows evicted, of long texts, heads, of many drafters, learning, of many texts,
    # and the one-minute table run only if they are named.
    absent = {"evicted", "heads", "learning", "minute"} | ({"cross"} if config.cross is None else set())
    absent |= {"medusa", "typical"} if config.heads is None and config.target not in MEDUSA_HEADS else set()
    wanted = config.rows or ("minute",)
    if ALL in wanted:
        wanted = tuple(name for name in ROWS if name not in absent or name in wanted)
    if "peers" in config.rows and not config.peers:
        raise InputError("row peers measures others beside us and peers is off; leave one of the two out")
    if set(wanted) - RANDOM:
        config.check_pair(alone=set(wanted) <= RANDOM | ALONE)
    if {"medusa", "typical"} & set(wanted):
        config.medusa_heads  # noqa: B018

    def rows() -> Iterator[Row]:
        for name in wanted:
            try:
                row = measure(name, config, note)
                # Of the whole process so far: transformers' copies and the rows before are in it.
                yield replace(row, conditions={**row.conditions, "process_peak_bytes": peak_bytes()})
            except SakiyomiError as error:
                yield Row(name, "failed", [], error=str(error))

    return rows()
