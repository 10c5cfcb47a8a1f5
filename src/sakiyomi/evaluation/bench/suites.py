"""The rows of ``sakiyomi bench``, by name. A new row is a function and its name below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from sakiyomi.core.embedded import MEDUSA_HEADS
from sakiyomi.core.errors import InputError
from sakiyomi.core.memory import peak_bytes
from sakiyomi.evaluation.bench.by_kind import kinds
from sakiyomi.evaluation.bench.card import minute
from sakiyomi.evaluation.bench.config import BenchConfig, Note, silent
from sakiyomi.evaluation.bench.contest import peers
from sakiyomi.evaluation.bench.drafts import oracle
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.medusa import typical
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.speed import dropin, speculative, stories, sweep
from sakiyomi.evaluation.bench.study import attempted

Measure = Callable[[PairRow], Row]
Rows = Mapping[str, Measure]
_DECLARED: list[Measure] = [minute, kinds, speculative, stories, sweep, oracle, peers, dropin, typical]
ROWS: dict[str, Measure] = {row.__name__: row for row in _DECLARED}
"""Named as the functions are, in the order in which they run."""

ALL = "all"
"""In the place of names of rows."""

ALONE = {"minute", "kinds"}
"""Rows of a target without a draft model."""


def measure(name: str, config: BenchConfig, note: Note = silent, rows: Rows = ROWS) -> Row:
    """Measure one row."""
    return rows[name](PairRow(name, config, note))


def run(config: BenchConfig, note: Note = silent, rows: Rows = ROWS, alone: Set[str] = ALONE) -> Iterator[Row]:
    """Run the requested rows and yield each when it is measured. A row that fails has an error; the others still run.

    Args:
        config: names the rows; none: the one-minute table.
        note: receives lines of progress.
        rows: the known rows, by name.
        alone: those of them that need no draft model.

    Raises:
        InputError, LoadError: a row is not known, or what rows of a pair need is not there; before any work.
    """
    wanted = _wanted(config, rows)
    if "peers" in config.rows and not config.peers:
        raise InputError("row peers measures others beside us and peers is off; leave one of the two out")
    if (config.task or config.gguf) and "kinds" not in wanted:
        raise InputError("task and gguf are for row kinds, which is not asked for; add --rows kinds, or drop them")
    config.check_pair(alone=set(wanted) <= alone)
    if "typical" in wanted or "medusa" in wanted:
        config.medusa_heads  # noqa: B018

    def measured() -> Iterator[Row]:
        for name in wanted:
            row = attempted(name, "failed", partial(measure, name, config, note, rows))
            # Of the whole process so far: transformers' copies and the rows before are in it.
            yield replace(row, conditions={**row.conditions, "process_peak_bytes": peak_bytes()})

    return measured()


def _wanted(config: BenchConfig, rows: Rows) -> Sequence[str]:
    """Names of the rows to run; ``all`` leaves out rows whose heads are not known."""
    for name in config.rows:
        if name not in (*rows, ALL):
            more = "; rows about sakiyomi's own code are in the source repository: python benchmarks/rows.py --help"
            known = f"rows are {', '.join(rows)}, and all{more if rows is ROWS else ''}"
            raise InputError(f"there is no row {name!r}; {known}")
    if ALL not in config.rows:
        return config.rows or ("minute",)
    absent = {"minute", "kinds"} | (
        {"typical"} if config.heads is None and config.target not in MEDUSA_HEADS else set()
    )
    return [name for name in rows if name not in absent or name in config.rows]
