"""A target that drafts for itself: by its weights in 8 bits, and by its first layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from sakiyomi.drafters.early_exit import EarlyExit
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Run
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Lap
from sakiyomi.model_executor.early_exit import FirstLayers

__all__ = ["selfdraft"]

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
