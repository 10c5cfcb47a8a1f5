"""Rows about kinds of drafts: trees against chains, and a target that drafts for itself."""

from __future__ import annotations

import statistics
from typing import Any

from sakiyomi.drafters.early_exit import EarlyExit
from sakiyomi.engine.machine import pass_seconds
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.meter import round_ms
from sakiyomi.evaluation.bench.runner import TimedRun, figured
from sakiyomi.model_executor.early_exit import FirstLayers

__all__ = ["selfdraft", "trees"]

NODES = 15
CHAINS = (2, 4, 8)


@declared("greedy, trees against chains of one drafter, tokens/s")
def trees(row: PairRow) -> Races:
    """Greedy: plain, chains of several lengths, trees of 15 nodes with --gamma levels, and what "auto" chooses."""
    llm, depth = row.llm(), row.config.gamma
    ways: dict[str, dict[str, Any]] = {f"chain of {depth}": {}}
    ways |= {f"chain of {gamma}": {"gamma": gamma} for gamma in CHAINS}
    ways |= {f"{tree}, {NODES} nodes": {"tree": tree, "nodes": NODES} for tree in ("best-first", "dynamic", "static")}
    ways["best-first, nodes heuristic"] = {"tree": "best-first", "nodes": "heuristic"}
    ways["best-first, nodes auto"] = {"tree": "best-first"}
    ways |= {"chain, gamma auto": {"gamma": "auto", "tree": "chain"}, "auto": {"gamma": "auto"}}
    for name, more in ways.items():  # "auto" measures what passes cost
        row.note(f"warming up, {name}")
        llm.generate(row.pair.prompts[:1], row.params(**more))
    runs = {name: row.run(llm, **more) for name, more in ways.items()} | {"plain": row.run(EngineView(llm))}
    standings = yield Race(runs, row.pair.judge(llm))
    auto = next(standing for standing in standings if standing.name == "auto")
    chains = [standing for standing in standings if standing.name.startswith("chain of")]
    best = max(chains, key=lambda standing: statistics.median(standing.speeds))
    row.notes.append(f"auto against {best.name}, the fastest chain: {auto.ratio_to(best):.2f} in the median run")
    passes = pass_seconds(llm.target, (1, 4, 8, 16))
    costs: dict[str, Any] = {f"v{rows}": seconds / passes[1] for rows, seconds in passes.items() if rows > 1}
    model = llm.draft.model if llm.draft is not None else None
    costs["c"] = pass_seconds(model, (1,))[1] / passes[1] if model is not None else 0.0
    return costs | row.conditions(llm)


SHARES = (0.25, 0.5, 0.75)
"""Of the layers, after which there is an exit."""


@declared("greedy, a target that drafts for itself, tokens/s")
def selfdraft(row: PairRow) -> Races:
    """Greedy: plain, with copies in fewer bits unless the target's own weights are quantized, and with exits."""
    llm = row.llm("none")
    layers = int(llm.target.config.num_hidden_layers)
    copies = () if row.config.quantize else ("self-int8", "self-int4")
    ways: dict[str, Any] = {"plain": EngineView(llm)} | {name: EngineView(llm, llm.drafter(name)) for name in copies}
    for count in sorted({min(max(1, round(share * layers)), layers - 1) for share in SHARES} - {0}):
        ways[f"early-exit:{count}"] = EngineView(llm, EarlyExit(FirstLayers(llm.target, count)))
    yield Race({name: figured(row.run(way), _draft_share) for name, way in ways.items()}, row.pair.judge(llm))
    return row.conditions(llm, alone=True, layers=layers)


def _draft_share(run: TimedRun) -> dict[str, float]:
    """The share of a round that goes into drafting."""
    return {"draft_share": run.figures["draft_ms"] / max(round_ms(run.figures), 1e-9)}
