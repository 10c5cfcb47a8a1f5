"""Every drafter of a target on the same prompts: tokens and milliseconds of a round, and speed."""

from __future__ import annotations

from functools import partial
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Stats
from sakiyomi.drafters import parse_drafters
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.meter import round_ms
from sakiyomi.evaluation.bench.runner import TimedRun, figured
from sakiyomi.evaluation.tuning.candidates import available, made

__all__ = ["heads"]

NODES = 16
DEEP = 7
"""Levels of these trees at most."""
TEMPERATURES = (0.0, 1.0)


@declared("every drafter on the same prompts, one at a time, tokens/s")
def heads(row: PairRow) -> Races:
    """Plain and every known or given drafter, greedy and sampled, with gamma "auto".

    ``tau_16``: tokens a pass with trees of 16 nodes, whatever they cost; None: the drafter makes none.
    """
    config, llm = row.config, row.llm("none")
    given = [] if config.draft == "auto" else [config.draft]
    given += [str(spec) for spec in parse_drafters(config.heads)] if config.heads else []
    specs = [*given, *available(llm, config.target)]
    found, why = made(specs, llm.drafter, given, row.note)
    ways = {"plain": EngineView(llm)} | {spec: EngineView(llm, own) for spec, own in found.items() if own is not None}
    for temperature in TEMPERATURES:
        more: dict[str, Any] = {"temperature": temperature, "seed": 7}
        runs = {}
        for name, way in ways.items():
            row.note(f"trees of {NODES} nodes, {name}")
            tau = None if name == "plain" else _tree_tau(row, way, more)
            runs[name] = figured(row.run(way, gamma="auto", **more), partial(_figures, tau))
        row.warm(runs, llm)
        yield Race(runs, None if temperature else row.pair.judge(llm), f"T={temperature:g}")
    row.notes += [f"{spec} is left out: {said}" for spec, said in why.items()]
    return row.conditions(llm, alone=True, sizes="auto")


def _figures(tau: float | None, run: TimedRun) -> dict[str, float]:
    """Milliseconds of a whole round, and tau of large trees."""
    return {"round_ms": round_ms(run.figures)} | ({} if tau is None else {"tau_16": tau})


def _tree_tau(row: PairRow, way: EngineView, more: dict[str, Any]) -> float | None:
    params = row.params(gamma=DEEP, tree="best-first", nodes=NODES, **more)
    try:
        done = [way.generate([prompt], params)[0] for prompt in row.pair.prompts]
    except InputError:
        return None
    return Stats.total(one.stats for one in done).tau
