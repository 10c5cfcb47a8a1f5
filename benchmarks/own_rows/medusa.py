"""Medusa heads beside a draft model, alone and merged with drafts from the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sakiyomi.drafters.medusa import MedusaDrafter
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.medusa import heads_conditions
from sakiyomi.evaluation.bench.runner import TimedRun, figured

__all__ = ["medusa"]

TEMPERATURES = (0.0, 0.7, 1.0)


@declared("heads against a draft model, one prompt at a time, tokens/s")
def medusa(row: PairRow) -> Races:
    """Plain, the draft model, heads, and heads merged with drafts from the text, at three temperatures."""
    config, llm = row.config, row.llm()
    drafter = MedusaDrafter.load(config.medusa_heads, llm.target)
    assert llm.draft is not None and llm.draft.model is not None
    model = llm.draft.model

    def own(run: TimedRun) -> dict[str, float]:
        """Megabytes that the draft model takes: its weights, keys and values."""
        pairs = sum(part.nbytes for part in (*model.cache.keys, *model.cache.values))
        return {"draft_mb": ((model.weights.bytes or 0) + pairs) / 1e6}

    merged = MergedDrafter([SuffixDrafter(), NgramDrafter(llm.vocab_size), drafter])
    heads = {"draft_mb": drafter.guesser.bytes / 1e6}
    ways: dict[str, tuple[Any, Callable[[TimedRun], Mapping[str, float]]]] = {
        "plain": (EngineView(llm), lambda run: {"draft_mb": 0.0}),
        "draft model": (llm, own),
        "medusa": (EngineView(llm, drafter), lambda run: heads),
        "medusa+suffix+ngram": (EngineView(llm, merged), lambda run: heads),
    }
    for temperature in TEMPERATURES:
        runs = {
            name: figured(row.run(way, temperature=temperature, seed=7, gamma="auto"), size)
            for name, (way, size) in ways.items()
        }
        row.warm(runs, llm)
        # Sampled text may differ at near-ties, too: it is not compared.
        yield Race(runs, None if temperature else row.pair.judge(llm), f"T={temperature:g}")
    return row.conditions(llm, gamma="auto", **heads_conditions(config, drafter))
