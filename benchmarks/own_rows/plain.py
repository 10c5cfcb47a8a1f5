"""Plain decoding of a random model against transformers, with recorded passes and without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from random_models import MEDIUM, Numbers, described, random_llama, random_prompts
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared, lengths, run_ours, run_peer
from sakiyomi.evaluation.bench.models import NearTies, rounding
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.runner import Contender

__all__ = ["plain"]


@declared("plain decoding, tokens/s")
def plain(row: PairRow) -> Races:
    """Plain decoding of a random model of 134M parameters against transformers."""
    config = row.config
    row.note("making the random model")
    model = random_llama(*MEDIUM, torch.bfloat16, device=config.device)
    prompts = random_prompts(1, config.prompt_tokens, MEDIUM[-1])
    params = SamplingParams(max_new_tokens=config.max_new_tokens, ignore_eos=True)
    pair = (model, Numbers())
    eager = LLM(pair, draft="none", compile=False, quantize=config.quantize)
    rounded = eager.target.weights.quantization is not None
    judge = NearTies(eager.target if rounded else model, prompts)
    contenders = [Contender("sakiyomi eager", partial(run_ours, eager, prompts, params), judge)]
    graphs = "eager"
    if config.compile:
        row.note("recording passes")
        ready = LLM(pair, draft="none", quantize=config.quantize)
        if ready.wait():
            contenders.insert(0, Contender("sakiyomi", partial(run_ours, ready, prompts, params), judge))
            graphs = f"{ready.target.mode} and eager"
    if config.peers:
        if rounded:
            contenders = [replace(contender, against=contenders[0].name) for contender in contenders]
        theirs = partial(run_peer, Transformers(model), prompts, params)
        contenders.insert(0, Contender("transformers", theirs, NearTies(model, prompts)))
    yield Race(contenders)
    known = {"model": described(model), "dtype": "bfloat16", "rounding": rounding(eager), "graphs": graphs}
    return known | lengths(config, prompts)
