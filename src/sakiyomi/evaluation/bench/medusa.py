"""Row ``typical``: what typical acceptance of Medusa heads costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sakiyomi.core.outputs import Generation
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.medusa import MedusaDrafter
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.reference import EngineReference
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared, run_ours
from sakiyomi.evaluation.bench.runner import TimedRun
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers.typical import threshold

EPSILONS = (0.01, 0.03, 0.09, 0.2, 0.4)
WARM = 0.7  # temperature, as in the paper's figures


@declared(
    f"what typical acceptance costs, temperature {WARM:g}; TV: mean distance of a token's distribution, given the text "
    "before it, from the target's"
)
def typical(row: PairRow) -> Races:
    """Lossless and typical acceptance of the same heads: tau, distance to the exact distribution and tokens/s."""
    config, llm = row.config, row.llm("none")
    drafter = MedusaDrafter.load(config.medusa_heads, llm.target)
    way = EngineView(llm, drafter)
    params = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=WARM, seed=7)
    ways = {"plain": (EngineView(llm), params), "coupled, lossless": (way, params)}
    for epsilon in EPSILONS:
        # The paper ties the two: delta is the root of epsilon.
        lossy = replace(params, acceptance="typical", epsilon=epsilon, delta=math.sqrt(epsilon))
        ways[f"typical, epsilon {epsilon:g}"] = (way, lossy)
    runs = {name: partial(_run_typical, *how, llm, row.pair.prompts) for name, how in ways.items()}
    row.warm(runs, llm)
    yield Race(runs)
    row.notes.append("typical is lossy: tau and speed are those of another text")
    known = {"target": config.target, "temperature": WARM, "delta": "root of epsilon", "sizes": "auto"}
    return known | heads_conditions(config, drafter)


def heads_conditions(config: BenchConfig, drafter: MedusaDrafter) -> dict[str, Any]:
    """For the conditions: heads, their size and what they were tuned to."""
    tuned = drafter.tuned
    size = f"{tuned.heads} heads, top {tuned.top_k}, {tuned.nodes} nodes" if tuned else "not tuned"
    return {"heads": config.medusa_heads, "heads_mb": drafter.guesser.bytes / 1e6, "tuned": size}


def _run_typical(way: Any, params: SamplingParams, llm: LLM, prompts: Sequence[Sequence[int]]) -> TimedRun:
    """With the distance of the text, which is measured after the clock has stopped."""
    done: list[Generation] = []
    run = run_ours(way, prompts, params, kept=done)
    lossy = params.acceptance == "typical"
    far = [_distance(llm, prompt, text, params) for prompt, text in zip(prompts, done, strict=True)] if lossy else [0.0]
    return run.more(TV=statistics.fmean(far))


def _distance(llm: LLM, prompt: Sequence[int], done: Generation, params: SamplingParams) -> float:
    """Mean total variation between the distribution that each token came from and the target's own.

    Given the text before it, an accepted draft token came with certainty: the distance is 1 - p of it. Any other token
    was drawn among the typical ones: the distance is the mass of the rest.
    """
    sampler = Sampler(params, llm.vocab_size)
    logits = EngineReference(llm.target).logits(prompt, done.token_ids)
    total = 0.0
    for entry, probs in zip(done.trace, sampler.probs(logits).numpy(), strict=True):
        if entry.status == "accepted":
            total += 1.0 - float(probs[entry.token_id])
        else:
            total += 1.0 - float(probs[probs > threshold(probs, params.epsilon, params.delta)].sum())
    return total / len(done.trace)
