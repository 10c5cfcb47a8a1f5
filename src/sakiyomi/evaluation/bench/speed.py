"""Tokens per second: plain and speculative, against transformers and against ourselves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.meter import Meter, round_figures
from sakiyomi.evaluation.bench.models import (
    MEDIUM,
    WAYS,
    NearTies,
    Numbers,
    Pair,
    described,
    random_llama,
    random_prompts,
)
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.quality import own_logits, their_logits
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, Judge, Lap, race, timed

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

__all__ = ["batch", "everybody", "our_lap", "pair_conditions", "plain", "speculative", "stories"]

Prompts = Sequence[Sequence[int]]
BATCH = 8


def our_lap(llm: Any, prompts: Prompts, params: SamplingParams, *, together: bool = False) -> Lap:
    """Our engine over all prompts, one after the other or all at once, with what it counted."""
    done: list[Any] = []

    def work() -> list[list[int]]:
        if together:
            done.extend(llm.generate([list(prompt) for prompt in prompts], params))
        else:
            for prompt in prompts:
                done.extend(llm.generate([list(prompt)], params))
        return [result.token_ids for result in done]

    with Meter(llm.engine) as meter:
        lap = timed(work)
    figures = round_figures(Stats.total(result.stats for result in done)) | meter.figures()
    figures["latency_seconds"] = statistics.median(result.stats.seconds for result in done)
    return Lap(lap.seconds, lap.tokens, lap.outputs, figures)


def peer_lap(peer: Transformers, prompts: Prompts, params: SamplingParams) -> Lap:
    """The same with transformers: all prompts, one after the other."""
    return timed(lambda: [peer.generate(prompt, params) for prompt in prompts])


def _ours(name: str, llm: Any, prompts: Prompts, params: SamplingParams, judge: Judge | None, **how: bool) -> Contender:
    return Contender(name, lambda: our_lap(llm, prompts, params, **how), judge)


def _theirs(name: str, peer: Transformers, prompts: Prompts, params: SamplingParams, judge: Judge | None) -> Contender:
    return Contender(name, lambda: peer_lap(peer, prompts, params), judge)


def plain(config: BenchConfig, note: Note) -> Row:
    """Plain decoding of a random model of 134M parameters against transformers."""
    from sakiyomi.engine.llm import LLM

    dtype = torch.bfloat16
    note("plain: making the random model")
    model = random_llama(*MEDIUM, dtype, device=config.device)
    prompts = random_prompts(1, config.prompt_tokens, MEDIUM[-1])
    params = SamplingParams(max_new_tokens=config.max_new_tokens, ignore_eos=True)
    pair = (model, Numbers())
    eager = LLM(pair, draft="none", compile=False, quantize=config.quantize)
    judge = NearTies(model if eager.target.weights.quantization is None else eager.target, prompts)
    contenders = [_ours("sakiyomi eager", eager, prompts, params, judge)]
    if config.compile:
        note("plain: compiling")
        compiled = LLM(pair, draft="none", compile=True, quantize=config.quantize)
        if compiled.compiled():
            contenders.insert(0, _ours("sakiyomi compiled", compiled, prompts, params, judge))
    if config.peers:
        if eager.target.weights.quantization is not None:
            contenders = _among_themselves(contenders)
        contenders.insert(0, _theirs("transformers", Transformers(model), prompts, params, NearTies(model, prompts)))
    standings = race(contenders, repeats=config.repeats, note=note)
    return of_race(
        "plain",
        "plain decoding, tokens/s",
        standings,
        model=described(model),
        dtype="bfloat16",
        rounding=eager.target.weights.quantization and str(eager.target.weights.quantization),
        graphs="compiled and eager" if config.compile and compiled.compiled() else "eager",
        **_laps(config, prompts),
    )


def _among_themselves(contenders: Sequence[Contender]) -> list[Contender]:
    """Contenders of one set of weights beside a baseline of another: each is compared with the first of them."""
    return [replace(contender, against=contenders[0].name) for contender in contenders]


def everybody(pair: Pair, llm: LLM, *, peers: Sequence[str] = (), auto: bool = False) -> list[Contender]:
    """The same greedy work: transformers in some of its ``WAYS``, ours plain and speculative.

    With ``auto`` also ours with gamma "auto".
    """
    config, judge = pair.config, pair.judge(llm)
    params = SamplingParams(max_new_tokens=config.max_new_tokens, gamma=config.gamma)
    contenders: list[Contender] = []
    if peers:
        theirs = [_theirs(f"transformers {way}", pair.peer(way), pair.prompts, params, pair.judge()) for way in peers]
        contenders += pair.quality.grade(theirs, their_logits(pair.target.model))
    ours = [
        _ours("sakiyomi plain", EngineView(llm), pair.prompts, params, judge),
        _ours("sakiyomi speculative", llm, pair.prompts, params, judge),
    ]
    if auto:
        ours.append(_ours("sakiyomi, gamma auto", llm, pair.prompts, replace(params, gamma="auto"), judge))
    if peers and llm.target.weights.quantization is not None:
        ours = _among_themselves(ours)
    return contenders + pair.quality.grade(ours, own_logits(llm.target))


def speculative(config: BenchConfig, note: Note) -> Row:
    """Our speculation against assisted generation of transformers: same pair, dtype and gamma."""
    pair = Pair(config)
    note("speculative: compiling")
    llm = pair.llm()
    contenders = everybody(pair, llm, peers=WAYS if config.peers else ())
    # The baseline is what the row is about: assisted generation, if peers are measured.
    contenders.sort(key=lambda contender: contender.name != "transformers assisted")
    standings = race(contenders, repeats=config.repeats, note=note)
    return of_race("speculative", "greedy, one prompt at a time, tokens/s", standings, **pair_conditions(pair, llm))


def stories(config: BenchConfig, note: Note) -> Row:
    """Our speculation against our own plain decoding."""
    pair = Pair(config)
    note("stories: compiling")
    llm = pair.llm()
    standings = race(everybody(pair, llm, auto=True), repeats=config.repeats, note=note)
    return of_race("stories", "greedy against own plain, tokens/s", standings, **pair_conditions(pair, llm))


def batch(config: BenchConfig, note: Note) -> Row:
    """Eight requests at once against one at a time, all tokens counted.

    Three times as many wait, so that the eight places are taken nearly to the end: texts need unlike numbers of rounds.
    """
    pair = Pair(config)
    params = SamplingParams(max_new_tokens=config.max_new_tokens, gamma=config.gamma, ignore_eos=True)
    prompts = (pair.prompts * (3 * BATCH))[: 3 * BATCH]
    llm = pair.llm(max_batch=BATCH)
    judge = pair.judge(llm, prompts)
    contenders = [
        _ours("batch of 1", llm, prompts, params, judge),
        _ours(f"batch of {BATCH}", llm, prompts, params, judge, together=True),
    ]
    contenders = pair.quality.grade(contenders, own_logits(llm.target))
    standings = race(contenders, repeats=config.repeats, note=note)
    return of_race("batch", "speculative, total tokens/s", standings, **pair_conditions(pair, llm, prompts))


def pair_conditions(pair: Pair, llm: LLM, prompts: Prompts | None = None) -> dict[str, Any]:
    """What has to be known of a row about a pair, after its laps; ``prompts``: others than the pair's."""
    config = pair.config
    found: dict[str, Any] = {**pair.names, **pair.dtypes, "gamma": config.gamma}
    found["rounding"] = llm.target.weights.quantization and str(llm.target.weights.quantization)
    found["graphs"] = "compiled" if llm.compiled() and llm.target.recorded(config.gamma + 1) else "eager"
    return found | _laps(config, pair.prompts if prompts is None else prompts) | pair.quality.conditions


def _laps(config: BenchConfig, prompts: Prompts) -> dict[str, Any]:
    return {
        "prompts": len(prompts),
        "prompt_tokens": "-".join(str(n) for n in sorted({min(map(len, prompts)), max(map(len, prompts))})),
        "max_new_tokens": config.max_new_tokens,
    }
