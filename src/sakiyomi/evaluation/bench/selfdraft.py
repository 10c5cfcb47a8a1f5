"""A target that drafts for itself: by its weights in 8 bits, and by its first layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.early_exit import EarlyExit
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, Lap, race
from sakiyomi.evaluation.bench.speed import our_lap
from sakiyomi.model_executor.early_exit import FirstLayers

__all__ = ["selfdraft"]

SHARES = (0.25, 0.5, 0.75)
"""Of the layers, after which there is an exit."""


def selfdraft(config: BenchConfig, note: Note) -> Row:
    """Greedy: plain, self-int8 where the target's own weights are not rounded, and exits after some of the layers."""
    pair = Pair(config)
    note("selfdraft: rounding and compiling")
    rounded = config.quantize is not None
    llm = pair.llm("none" if rounded else "self-int8")
    params = SamplingParams(max_new_tokens=config.max_new_tokens, gamma=config.gamma)
    layers = int(llm.target.config.num_hidden_layers)
    ways: dict[str, Any] = {"plain": EngineView(llm)} | ({} if rounded else {"self-int8": llm})
    for count in sorted({min(max(1, round(share * layers)), layers - 1) for share in SHARES} - {0}):
        ways[f"early-exit:{count}"] = EngineView(llm, EarlyExit(FirstLayers(llm.target, count)))
    judge = pair.judge(llm)
    contenders = [Contender(name, partial(_lap, way, pair, params), judge) for name, way in ways.items()]
    standings = race(contenders, repeats=config.repeats, note=note)
    conditions = pair.settings(llm) | {"layers": layers, "prompts": len(pair.prompts)}
    return of_race("selfdraft", "greedy, a target that drafts for itself, tokens/s", standings, **conditions)


def _lap(way: Any, pair: Pair, params: SamplingParams) -> Lap:
    """With the share of a round that goes into drafting."""
    lap = our_lap(way, pair.prompts, params)
    parts = [lap.figures[name] for name in ("draft_ms", "score_ms", "overhead_ms")]
    return replace(lap, figures=lap.figures | {"draft_share": parts[0] / max(sum(parts), 1e-9)})
