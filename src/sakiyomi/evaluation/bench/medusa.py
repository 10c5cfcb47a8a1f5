"""Medusa heads beside a draft model, alone and merged with drafts from the text; and what typical acceptance costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sakiyomi.core.outputs import Generation
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.medusa import MedusaDrafter
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, Lap, race
from sakiyomi.evaluation.bench.speed import our_lap, pair_conditions
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers.typical import threshold

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

__all__ = ["medusa", "typical"]

TEMPERATURES = (0.0, 0.7, 1.0)
EPSILONS = (0.01, 0.03, 0.09, 0.2, 0.4)
WARM = 0.7  # temperature of the row typical, as in the paper's figures


def medusa(config: BenchConfig, note: Note) -> Row:
    """Plain, the draft model, heads, and heads merged with drafts from the text, at three temperatures."""
    pair = Pair(config)
    note("medusa: compiling")
    llm = pair.llm()
    drafter = MedusaDrafter.load(config.medusa_heads, llm.target)
    assert llm.draft is not None and llm.draft.model is not None
    model = llm.draft.model
    merged = MergedDrafter([SuffixDrafter(), NgramDrafter(llm.vocab_size), drafter])
    ways = {
        "plain": (EngineView(llm), 0),
        "draft model": (llm, model.weights.bytes or 0),
        "medusa": (EngineView(llm, drafter), drafter.guesser.bytes),
        "medusa+suffix+ngram": (EngineView(llm, merged), drafter.guesser.bytes),
    }
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    for temperature in TEMPERATURES:
        params = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=temperature, seed=7)
        judge = None if temperature else pair.judge(llm)  # near-ties of sampled text part it too
        contenders = [
            Contender(name, partial(_lap, way, pair.prompts, params, model if way is llm else None, size), judge)
            for name, (way, size) in ways.items()
        ]
        for contender in contenders:  # graphs of all sizes that they meet
            note(f"medusa: warming up, {contender.name}")
            contender.run()
            llm.wait()
        standings = race(contenders, repeats=config.repeats, note=note)
        row = of_race("medusa", "", standings)
        lines += [{**line, "name": f"T={temperature:g}: {line['name']}"} for line in row.lines]
        notes += [f"T={temperature:g}: {text}" for text in row.notes]
    conditions = pair_conditions(pair, llm) | _conditions(config, drafter) | {"sizes": "auto", "laps": config.repeats}
    del conditions["gamma"]
    return Row("medusa", "heads against a draft model, one prompt at a time, tokens/s", lines, conditions, notes)


def typical(config: BenchConfig, note: Note) -> Row:
    """Lossless and typical acceptance of the same heads: tau, distance to the exact distribution and tokens/s."""
    pair = Pair(config)
    note("typical: compiling")
    llm = pair.llm("none")
    drafter = MedusaDrafter.load(config.medusa_heads, llm.target)
    way = EngineView(llm, drafter)
    params = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=WARM, seed=7)
    ways = {"plain": (EngineView(llm), params), "coupled, lossless": (way, params)}
    for epsilon in EPSILONS:
        # The paper ties the two: delta is the root of epsilon.
        lossy = replace(params, acceptance="typical", epsilon=epsilon, delta=math.sqrt(epsilon))
        ways[f"typical, epsilon {epsilon:g}"] = (way, lossy)
    contenders = [Contender(name, partial(_typical_lap, *how, llm, pair.prompts)) for name, how in ways.items()]
    for contender in contenders:
        note(f"typical: warming up, {contender.name}")
        contender.run()
        llm.wait()
    standings = race(contenders, repeats=config.repeats, note=note)
    conditions = {"target": config.target, "temperature": WARM, "delta": "root of epsilon", "sizes": "auto"}
    row = of_race(
        "typical",
        f"what typical acceptance costs, temperature {WARM:g}; TV: mean distance of a token's distribution, given the "
        "text before it, from the target's",
        standings,
        **conditions | _conditions(config, drafter),
    )
    return replace(row, notes=[*row.notes, "typical is lossy: tau and speed are those of another text"])


def _conditions(config: BenchConfig, drafter: MedusaDrafter) -> dict[str, Any]:
    tuned = drafter.tuned
    size = f"{tuned.heads} heads, top {tuned.top_k}, {tuned.nodes} nodes" if tuned else "not tuned"
    return {"heads": config.medusa_heads, "heads_mb": drafter.guesser.bytes / 1e6, "tuned": size}


def _lap(way: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, model: Any, size: int) -> Lap:
    """With what the draft takes beside the target: its weights, and keys and values of its own."""
    lap = our_lap(way, prompts, params)
    if model is not None:
        size += sum(tensor.nbytes for tensor in (*model.cache.keys, *model.cache.values))
    return replace(lap, figures=lap.figures | {"draft_mb": size / 1e6})


def _typical_lap(way: Any, params: SamplingParams, llm: LLM, prompts: Sequence[Sequence[int]]) -> Lap:
    """With the distance of what was written; measured behind the clock."""
    done: list[Generation] = []

    class _Kept:
        engine = way.engine

        @staticmethod
        def generate(some: Any, params: SamplingParams) -> list[Generation]:
            found: list[Generation] = way.generate(some, params)
            done.extend(found)
            return found

    lap = our_lap(_Kept, prompts, params)
    lossy = params.acceptance == "typical"
    far = [_distance(llm, prompt, text, params) for prompt, text in zip(prompts, done, strict=True)] if lossy else [0.0]
    return replace(lap, figures=lap.figures | {"TV": statistics.fmean(far)})


def _distance(llm: LLM, prompt: Sequence[int], done: Generation, params: SamplingParams) -> float:
    """Mean over the tokens of a text of how far the distribution that each came from is from the target's own.

    Given the text before it a drafted token was taken for certain: total variation 1 - p of it. The target's own was
    drawn among the typical tokens: the mass of the others.
    """
    sampler = Sampler(params, llm.vocab_size)
    ids = [*prompt, *done.token_ids[:-1]]
    with llm.target.cache.lent(len(ids)) as slot:
        logits = llm.target.score([SequenceRows(slot, 0, ids, prompt=True)]).logits[len(prompt) - 1 :]
    total = 0.0
    for entry, probs in zip(done.trace, sampler.probs(logits).numpy(), strict=True):
        if entry.status == "accepted":
            total += 1.0 - float(probs[entry.token_id])
        else:
            total += 1.0 - float(probs[probs > threshold(probs, params.epsilon, params.delta)].sum())
    return total / len(done.trace)
