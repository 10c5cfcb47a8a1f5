"""What a draft costs that is never right: speculation should switch itself off."""

from __future__ import annotations

import torch

from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.session import DRAFT_SIZES

__all__ = ["useless"]


def useless(row: PairRow) -> Row:
    """Plain, and with a draft whose every token is another one: gamma auto, which finds out, and a fixed gamma."""
    llm = row.llm(draft=_wrong(row.pair))
    ways = {
        "plain": row.run(EngineView(llm), ignore_eos=True),
        "auto": row.run(llm, ignore_eos=True, gamma="auto"),
        "chain, gamma auto": row.run(llm, ignore_eos=True, gamma="auto", tree="chain"),
        f"chain of {row.config.gamma}": row.run(llm, ignore_eos=True),
    }
    standings = row.race(ways, row.pair.judge(llm))
    conditions = row.conditions(llm, draft_is="the same with its vocabulary rolled by one")
    return row.row("greedy with a draft that is never right, tokens/s", standings, **conditions)


def _wrong(pair: Pair) -> ModelDrafter:
    """The pair's draft model, each of whose tokens is called by the next one's number."""
    model = pair.draft.model
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().roll(1, 0).clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    packed = build_runner(model, max_slots=8, compile="auto" if pair.config.compile else False, first_sizes=DRAFT_SIZES)
    return ModelDrafter(packed, int(pair.target.model.get_output_embeddings().out_features))
