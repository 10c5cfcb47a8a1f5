"""What a draft costs that is never right: reading ahead should switch itself off."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, race
from sakiyomi.evaluation.bench.speed import our_lap, pair_conditions
from sakiyomi.model_executor.build import build_runner

if TYPE_CHECKING:
    from sakiyomi.drafters.model import ModelDrafter

__all__ = ["useless"]


def useless(config: BenchConfig, note: Note) -> Row:
    """Plain, and with a draft whose every token is another one: gamma auto, which finds out, and a fixed gamma."""
    pair = Pair(config)
    note("useless: compiling")
    llm = pair.llm(draft=_wrong(pair, config))
    params = SamplingParams(max_new_tokens=config.max_new_tokens, gamma=config.gamma, ignore_eos=True)
    judge = pair.judge(llm)
    ways: dict[str, tuple[Any, SamplingParams]] = {
        "plain": (EngineView(llm), params),
        "auto": (llm, replace(params, gamma="auto")),
        "chain, gamma auto": (llm, replace(params, gamma="auto", tree="chain")),
        f"chain of {config.gamma}": (llm, params),
    }
    contenders = [
        Contender(name, partial(our_lap, engine, pair.prompts, values), judge)
        for name, (engine, values) in ways.items()
    ]
    standings = race(contenders, repeats=config.repeats, note=note)
    conditions = pair_conditions(pair, llm) | {"draft_is": "the same with its vocabulary rolled by one"}
    return of_race("useless", "greedy with a draft that is never right, tokens/s", standings, **conditions)


def _wrong(pair: Pair, config: BenchConfig) -> ModelDrafter:
    """The pair's draft model, each of whose tokens is called by the next one's number."""
    from sakiyomi.drafters.model import ModelDrafter
    from sakiyomi.model_executor.runner import DRAFT_SIZES

    model = pair.draft.model
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().roll(1, 0).clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    packed = build_runner(model, max_slots=8, compile="auto" if config.compile else False, first_sizes=DRAFT_SIZES)
    return ModelDrafter(packed, int(pair.target.model.get_output_embeddings().out_features))
