"""Trees against chains of the same drafter, and how often a first level holds what the target chooses."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Standing

__all__ = ["coverage", "trees"]

NODES = 15
CHAINS = (2, 4, 8)
SIBLINGS = (1, 2, 4)


def trees(row: PairRow) -> Row:
    """Greedy: plain, chains of several lengths, trees of 15 nodes with --gamma levels, and what "auto" chooses."""
    llm, depth = row.llm(), row.config.gamma
    ways: dict[str, dict[str, Any]] = {f"chain of {depth}": {}}
    ways |= {f"chain of {gamma}": {"gamma": gamma} for gamma in CHAINS}
    ways |= {f"{tree}, {NODES} nodes": {"tree": tree, "nodes": NODES} for tree in ("best-first", "dynamic", "static")}
    ways["best-first, nodes heuristic"] = {"tree": "best-first", "nodes": "heuristic"}
    ways["best-first, nodes auto"] = {"tree": "best-first"}
    ways |= {"chain, gamma auto": {"gamma": "auto", "tree": "chain"}, "auto": {"gamma": "auto"}}
    for name, more in ways.items():  # graphs of all sizes that they meet
        row.note(f"warming up, {name}")
        llm.generate(row.pair.prompts[:1], row.params(**more))
        llm.wait()
    runs = {name: row.run(llm, **more) for name, more in ways.items()} | {"plain": row.run(EngineView(llm))}
    standings = row.race(runs, row.pair.judge(llm))
    plain = llm.target.pass_seconds(1)
    costs: dict[str, Any] = {f"v{rows}": llm.target.pass_seconds(rows) / plain for rows in (4, 8, 16)}
    model = llm.draft.model if llm.draft is not None else None
    costs["c"] = model.pass_seconds(1) / plain if model is not None else 0.0
    conditions = costs | row.conditions(llm)
    title = "greedy, trees against chains of one drafter, tokens/s"
    return row.row(title, standings, notes=_verdict(standings), **conditions)


def _verdict(standings: list[Standing]) -> list[str]:
    """How what "auto" picked stands beside the best chain, lap by lap."""
    auto = next(standing for standing in standings if standing.name == "auto")
    chains = [standing for standing in standings if standing.name.startswith("chain of")]
    best = max(chains, key=lambda standing: statistics.median(standing.speeds))
    return [f"auto against {best.name}, the fastest chain: {auto.ratio_to(best):.2f} in the median lap"]


def coverage(row: PairRow) -> Row:
    """Sampled at temperature 1: how often one of 1, 2 or 4 siblings is what the target chooses; no speeds."""
    llm = row.llm()
    lines = []
    for rule, tree in (("coupled", "best-first"), ("ratio", "static")):
        for count in SIBLINGS:
            row.note(f"{rule}, {count} siblings")
            params = row.params(gamma=1, temperature=1.0, ignore_eos=True, acceptance=rule, nodes=count, tree=tree)
            rounds = [
                traced
                for i, prompt in enumerate(row.pair.prompts)
                for traced in llm.generate([prompt], replace(params, seed=i), rounds_trace=True)[0].rounds_trace
                if traced.tokens
            ]
            lines.append({
                "name": f"{rule}, {count} sibling{'s' if count > 1 else ''}",
                "rounds": len(rounds),
                "coverage": sum(bool(traced.path) for traced in rounds) / max(len(rounds), 1),
            })  # fmt: skip
    conditions = row.conditions(llm, gamma=1, temperature=1.0)
    return Row("coverage", "share of rounds whose first level held the target's choice", lines, conditions)
