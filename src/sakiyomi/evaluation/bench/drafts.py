"""Rows about kinds of drafts: trees, drafts of known rate at no cost, a target that drafts for itself, useless ones."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sakiyomi.drafters.early_exit import EarlyExit
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.oracle import Oracle
from sakiyomi.engine.machine import pass_seconds
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Run
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Lap, Spread, Standing
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.early_exit import FirstLayers
from sakiyomi.theory import expected_tokens

__all__ = ["coverage", "oracle", "selfdraft", "trees", "useless", "wrong_draft"]

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
    for name, more in ways.items():  # what passes cost is learnt
        row.note(f"warming up, {name}")
        llm.generate(row.pair.prompts[:1], row.params(**more))
    runs = {name: row.run(llm, **more) for name, more in ways.items()} | {"plain": row.run(EngineView(llm))}
    standings = row.race(runs, row.pair.judge(llm))
    passes = pass_seconds(llm.target, (1, 4, 8, 16))
    costs: dict[str, Any] = {f"v{rows}": seconds / passes[1] for rows, seconds in passes.items() if rows > 1}
    model = llm.draft.model if llm.draft is not None else None
    costs["c"] = pass_seconds(model, (1,))[1] / passes[1] if model is not None else 0.0
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


RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
GAMMAS = (1, 2, 4, 8, 16)
"""At rate 1: passes against length."""


def oracle(row: PairRow) -> Row:
    """Greedy text, one prompt at a time; the answers are known after the warm-up lap.

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

    runs = {"plain": row.run(EngineView(llm), ignore_eos=True)}
    runs |= {f"{r:g}, gamma {n}": partial(lap, r, row.run(llm, gamma=n, ignore_eos=True)) for r, n in points}
    plain, *drafted = row.race(runs, row.pair.judge(llm))
    texts = len(row.pair.prompts)
    lines = [_line(*point, standing, plain, texts) for point, standing in zip(points, drafted, strict=True)]
    conditions = row.conditions(llm, laps=row.config.repeats, draft="oracle") | {"A/A": Spread.shown([plain, *drafted])}
    conditions["plain_tokens_per_second"] = statistics.median(plain.speeds)
    notes = dict.fromkeys(found.agreement.note for found in (plain, *drafted) if found.agreement.note)
    return Row("oracle", "a draft of known rate at no cost: tokens a pass and speed-up", lines, conditions, list(notes))


def _line(rate: float, gamma: int, standing: Standing, plain: Standing, texts: int) -> dict[str, Any]:
    shown, base = standing.to_dict(), plain.to_dict()
    expected = expected_tokens(rate, gamma)
    # The first token of each text is the prompt's.
    length = standing.laps[0].tokens // texts - 1
    tokens = length * texts
    return {
        "rate": rate,
        "gamma": gamma,
        "expected": expected,
        "tau": statistics.fmean(lap.figures["tau"] for lap in standing.laps),
        "passes": round(tokens / shown["tau"]),
        "least": math.ceil(length / (gamma + 1)) * texts if rate == 1.0 else None,
        "oracle_tokens_per_second": shown["tokens_per_second"],
        "ratio": shown["ratio"],
        "predicted": expected * _round(base) / _round(shown),
        "equal": shown["equal"],
    }


def _round(figures: dict[str, Any]) -> float:
    """Milliseconds of a round; the draft's are none."""
    total: float = figures["score_ms"] + figures["overhead_ms"]
    return total


SHARES = (0.25, 0.5, 0.75)
"""Of the layers, after which there is an exit."""


def selfdraft(row: PairRow) -> Row:
    """Greedy: plain, self-int8 unless the target's own weights are quantized, and exits after some of the layers."""
    rounded = row.config.quantize is not None
    llm = row.llm("none" if rounded else "self-int8")
    layers = int(llm.target.config.num_hidden_layers)
    ways: dict[str, Any] = {"plain": EngineView(llm)} | ({} if rounded else {"self-int8": llm})
    for count in sorted({min(max(1, round(share * layers)), layers - 1) for share in SHARES} - {0}):
        ways[f"early-exit:{count}"] = EngineView(llm, EarlyExit(FirstLayers(llm.target, count)))
    standings = row.race({name: partial(_lap, row.run(way)) for name, way in ways.items()}, row.pair.judge(llm))
    conditions = row.pair.settings(llm) | {"layers": layers, "prompts": len(row.pair.prompts)}
    return row.row("greedy, a target that drafts for itself, tokens/s", standings, **conditions)


def _lap(run: Run) -> Lap:
    """With the share of a round that goes into drafting."""
    lap = run()
    parts = [lap.figures[name] for name in ("draft_ms", "score_ms", "overhead_ms")]
    return lap.more(draft_share=parts[0] / max(sum(parts), 1e-9))


def useless(row: PairRow) -> Row:
    """Plain, and with a draft whose every token is another one: gamma auto, which finds out, and a fixed gamma."""
    llm = row.llm(draft=wrong_draft(row.pair, 1))
    ways = {
        "plain": row.run(EngineView(llm), ignore_eos=True),
        "auto": row.run(llm, ignore_eos=True, gamma="auto"),
        "chain, gamma auto": row.run(llm, ignore_eos=True, gamma="auto", tree="chain"),
        f"chain of {row.config.gamma}": row.run(llm, ignore_eos=True),
    }
    standings = row.race(ways, row.pair.judge(llm))
    conditions = row.conditions(llm, draft_is="the same with its vocabulary rolled by one")
    return row.row("greedy with a draft that is never right, tokens/s", standings, **conditions)


def wrong_draft(pair: Pair, max_slots: int) -> ModelDrafter:
    """The pair's draft model, for so many requests, each of whose tokens is called by the next one's number."""
    model = pair.draft.model
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().roll(1, 0).clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    compile: bool | str = "auto" if pair.config.compile else False
    packed = build_runner(model, max_slots=max_slots, compile=compile)
    return ModelDrafter(packed, int(pair.target.model.get_output_embeddings().out_features))
