"""Throughput and latency against the number of requests at once, plain and speculative: when does speculation no longer
pay?
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Spread, Standing

__all__ = ["sweep"]


def sweep(row: PairRow) -> Row:
    """So many requests at once, no others waiting; plain and speculative take turns at each size, on one target.

    A size pays if speculation has more total tokens/s than plain generation, by more than two equal things differ.
    Latency is the median over requests of the time from a request's start to its last token.
    """
    config, sizes = row.config, sorted(set(row.config.batch_sizes))
    llm = row.llm(max_batch=sizes[-1])
    ways = {"plain": EngineView(llm), "speculative": llm}
    everyone = list(islice(cycle(row.pair.prompts), sizes[-1]))
    judge = row.pair.judge(llm, everyone)
    lines: list[dict[str, Any]] = []
    notes = []
    for size in sizes:
        try:
            llm.target.cache.check(size, max(map(len, everyone)) + config.max_new_tokens)
        except MemoryLimitError as error:
            notes.append(f"batch of {size} and above: {error}")
            break
        runs = {
            name: row.run(way, prompts=everyone[:size], together=True, ignore_eos=True) for name, way in ways.items()
        }
        standings = row.race(runs, judge, where=f"batch of {size}")
        lines.append(_line(size, standings))
        notes += [f"batch of {size}: {found.agreement.note}" for found in standings if found.agreement.note]
    notes.append(_mark(lines))
    conditions = row.conditions(llm, graphs_up_to_rows=llm.target.sizes[-1], laps=config.repeats)
    conditions.pop("perplexity_of", None)  # the same at every size: not measured here
    return Row("sweep", "total tokens/s and seconds a request, by requests at once", lines, conditions, notes)


def _line(size: int, standings: Sequence[Standing]) -> dict[str, Any]:
    plain, speculative = (standing.to_dict() for standing in standings)
    line: dict[str, Any] = {"batch": size}
    for figure in ("tokens_per_second", "low", "high", "latency_seconds"):
        line |= {f"plain_{figure}": plain[figure], f"speculative_{figure}": speculative[figure]}
    spread, ratio = Spread.of(standings), speculative["ratio"]
    pays = None
    if ratio is not None:
        pays = "even" if spread is not None and ratio in spread else "yes" if ratio > 1 else "no"
    return line | {
        "ratio": ratio,
        "A/A": spread and str(spread),
        "tau": speculative["tau"],
        "kv_bytes": speculative["kv_bytes"],
        "pays": pays,
        "stops": False,
        "equal": speculative["equal"],
    }


def _mark(lines: Sequence[dict[str, Any]]) -> str:
    """Mark the first size at which speculation is slower than plain generation; a sentence about it."""
    stop = next((i for i, line in enumerate(lines) if line["pays"] == "no"), len(lines))
    paid = max((line["batch"] for line in lines[:stop] if line["pays"] == "yes"), default=None)
    before = "" if paid is None else f"pays up to a batch of {paid} and "
    if stop == len(lines):
        return f"speculation {before}is slower at no size"
    lines[stop]["stops"] = True
    return f"speculation {before}is slower at {lines[stop]['batch']} (ratio {lines[stop]['ratio']:.2f})"
