"""Trees against chains of the same drafter, and how often a first level holds what the target chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, Standing, race
from sakiyomi.evaluation.bench.speed import our_lap, pair_conditions

__all__ = ["coverage", "trees"]

NODES = 15
CHAINS = (2, 4, 8)
SIBLINGS = (1, 2, 4)


def trees(config: BenchConfig, note: Note) -> Row:
    """Greedy: plain, chains of several lengths, trees of 15 nodes with --gamma levels, and what auto picks."""
    pair = Pair(config)
    note("trees: compiling")
    llm = pair.llm()
    depth = config.gamma
    params = SamplingParams(max_new_tokens=config.max_new_tokens, gamma=depth)
    ways: dict[str, dict[str, Any]] = {f"chain of {depth}": {}}
    ways |= {f"chain of {gamma}": {"gamma": gamma} for gamma in CHAINS}
    ways |= {f"{tree}, {NODES} nodes": {"tree": tree, "nodes": NODES} for tree in ("best-first", "dynamic", "static")}
    ways["best-first, nodes heuristic"] = {"tree": "best-first", "nodes": "heuristic"}
    ways["best-first, nodes auto"] = {"tree": "best-first"}
    ways |= {"chain, gamma auto": {"gamma": "auto", "tree": "chain"}, "auto": {"gamma": "auto"}}
    judge = pair.judge(llm)
    contenders = [
        Contender(name, partial(our_lap, llm, pair.prompts, replace(params, **more)), judge)
        for name, more in ways.items()
    ]
    contenders.append(Contender("plain", partial(our_lap, EngineView(llm), pair.prompts, params), judge))
    for name, more in ways.items():  # graphs of all sizes that they meet
        note(f"trees: warming up, {name}")
        llm.generate(pair.prompts[:1], replace(params, **more))
        llm.wait()
    standings = race(contenders, repeats=config.repeats, note=note)
    plain = llm.target.pass_seconds(1)
    costs: dict[str, Any] = {f"v{rows}": llm.target.pass_seconds(rows) / plain for rows in (4, 8, 16)}
    model = llm.draft.model if llm.draft is not None else None
    costs["c"] = model.pass_seconds(1) / plain if model is not None else 0.0
    row = of_race("trees", "greedy, trees against chains of one drafter, tokens/s", standings, **costs)
    return replace(
        row, notes=[*row.notes, *_verdict(standings)], conditions={**row.conditions, **pair_conditions(pair, llm)}
    )


def _verdict(standings: list[Standing]) -> list[str]:
    """How what "auto" picked stands beside the best chain, lap by lap."""
    auto = next(standing for standing in standings if standing.name == "auto")
    chains = [standing for standing in standings if standing.name.startswith("chain of")]
    best = max(chains, key=lambda standing: sorted(standing.speeds)[len(standing.speeds) // 2])
    ratios = sorted(a / b for a, b in zip(auto.speeds, best.speeds, strict=True))
    return [f"auto against {best.name}, the fastest chain: {ratios[len(ratios) // 2]:.2f} in the median lap"]


def coverage(config: BenchConfig, note: Note) -> Row:
    """Sampled at temperature 1: how often one of 1, 2 or 4 siblings is what the target chooses; no speeds."""
    pair = Pair(config)
    note("coverage: compiling")
    llm = pair.llm()
    params = SamplingParams(max_new_tokens=config.max_new_tokens, gamma=1, temperature=1.0, seed=0, ignore_eos=True)
    lines = []
    for rule, tree in (("coupled", "best-first"), ("ratio", "static")):
        for count in SIBLINGS:
            note(f"coverage: {rule}, {count} siblings")
            chosen = replace(params, acceptance=rule, nodes=count, tree=tree)  # type: ignore[arg-type]
            rounds = [
                traced
                for i, prompt in enumerate(pair.prompts)
                for traced in llm.generate([prompt], replace(chosen, seed=i), rounds_trace=True)[0].rounds_trace
                if traced.tokens
            ]
            lines.append({
                "name": f"{rule}, {count} sibling{'s' if count > 1 else ''}",
                "rounds": len(rounds),
                "coverage": sum(bool(traced.path) for traced in rounds) / max(len(rounds), 1),
            })  # fmt: skip
    conditions = pair_conditions(pair, llm) | {"gamma": 1, "temperature": 1.0}
    return Row("coverage", "share of rounds whose first level held the target's choice", lines, conditions)
