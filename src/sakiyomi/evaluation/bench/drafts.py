"""Rows about kinds of drafts: trees, drafts of known rate at no cost, a target that drafts for itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from sakiyomi.drafters.early_exit import EarlyExit
from sakiyomi.drafters.oracle import Oracle
from sakiyomi.engine.machine import pass_seconds
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, Run, declared
from sakiyomi.evaluation.bench.meter import round_ms
from sakiyomi.evaluation.bench.runner import Lap, Standing, figured
from sakiyomi.model_executor.early_exit import FirstLayers
from sakiyomi.theory import expected_tokens

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
    row.notes.append(f"auto against {best.name}, the fastest chain: {auto.ratio_to(best):.2f} in the median lap")
    passes = pass_seconds(llm.target, (1, 4, 8, 16))
    costs: dict[str, Any] = {f"v{rows}": seconds / passes[1] for rows, seconds in passes.items() if rows > 1}
    model = llm.draft.model if llm.draft is not None else None
    costs["c"] = pass_seconds(model, (1,))[1] / passes[1] if model is not None else 0.0
    return costs | row.conditions(llm)


RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
GAMMAS = (1, 2, 4, 8, 16)
"""At rate 1: passes against length."""


@declared("a draft of known rate at no cost: tokens a pass and speed-up")
def oracle(row: PairRow) -> Races:
    """Greedy text, one prompt at a time; the answers are known after the warm-up.

    Each line is a rate and a gamma. ``expected``: tokens a pass by theory, (1 - rate^(gamma + 1)) / (1 - rate), which
    would be the speed-up too if a pass over more rows cost no more; ``predicted``: the speed-up with what the passes
    and the bookkeeping took here. ``passes``: of the target, of all texts; ``least``: as few as theory allows.
    """
    llm = row.llm(draft="oracle")
    drafter = llm.draft
    assert isinstance(drafter, Oracle)
    points = [(rate, row.config.gamma) for rate in RATES]
    points += [(1.0, gamma) for gamma in GAMMAS if gamma != row.config.gamma]

    def lap(rate: float, run: Run) -> Lap:
        drafter.rate = rate
        return run()

    def lines(standings: list[Standing]) -> Iterator[dict[str, Any]]:
        plain, *drafted = standings
        for (rate, gamma), standing in zip(points, drafted, strict=True):
            yield _point(rate, gamma, standing, plain, len(row.pair.prompts))

    runs = {"plain": row.run(EngineView(llm), ignore_eos=True)}
    runs |= {f"{r:g}, gamma {n}": partial(lap, r, row.run(llm, gamma=n, ignore_eos=True)) for r, n in points}
    plain, *_ = yield Race(runs, row.pair.judge(llm), lines=lines)
    return row.conditions(llm, draft="oracle", plain_tokens_per_second=statistics.median(plain.speeds))


def _point(rate: float, gamma: int, standing: Standing, plain: Standing, texts: int) -> dict[str, Any]:
    shown = standing.to_dict()
    expected = expected_tokens(rate, gamma)
    length = standing.laps[0].tokens // texts - 1  # the first token of each text is the prompt's
    return {
        "rate": rate,
        "gamma": gamma,
        "expected": expected,
        "tau": statistics.fmean(lap.figures["tau"] for lap in standing.laps),
        "passes": round(length * texts / shown["tau"]),
        "least": math.ceil(length / (gamma + 1)) * texts if rate == 1.0 else None,
        "oracle_tokens_per_second": shown["tokens_per_second"],
        "ratio": shown["ratio"],
        "predicted": expected * round_ms(plain.to_dict(), draft=False) / round_ms(shown, draft=False),
        "equal": shown["equal"],
    }


SHARES = (0.25, 0.5, 0.75)
"""Of the layers, after which there is an exit."""


@declared("greedy, a target that drafts for itself, tokens/s")
def selfdraft(row: PairRow) -> Races:
    """Greedy: plain, self-int8 unless the target's own weights are quantized, and exits after some of the layers."""
    rounded = row.config.quantize is not None
    llm = row.llm("none" if rounded else "self-int8")
    layers = int(llm.target.config.num_hidden_layers)
    ways: dict[str, Any] = {"plain": EngineView(llm)} | ({} if rounded else {"self-int8": llm})
    for count in sorted({min(max(1, round(share * layers)), layers - 1) for share in SHARES} - {0}):
        ways[f"early-exit:{count}"] = EngineView(llm, EarlyExit(FirstLayers(llm.target, count)))
    yield Race({name: figured(row.run(way), _draft_share) for name, way in ways.items()}, row.pair.judge(llm))
    return row.conditions(llm, alone=True, layers=layers)


def _draft_share(lap: Lap) -> dict[str, float]:
    """The share of a round that goes into drafting."""
    return {"draft_share": lap.figures["draft_ms"] / max(round_ms(lap.figures), 1e-9)}
