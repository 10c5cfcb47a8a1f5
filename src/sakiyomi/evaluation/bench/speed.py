"""Tokens per second: plain and speculative, against transformers and against ourselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, lengths, our_lap, peer_lap
from sakiyomi.evaluation.bench.models import (
    MEDIUM,
    WAYS,
    NearTies,
    Numbers,
    described,
    random_llama,
    random_prompts,
    rounding,
)
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.quality import own_logits, their_logits
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Contender

__all__ = ["batch", "everybody", "plain", "speculative", "stories"]

BATCH = 8


def plain(row: PairRow) -> Row:
    """Plain decoding of a random model of 134M parameters against transformers."""
    config = row.config
    row.note("making the random model")
    model = random_llama(*MEDIUM, torch.bfloat16, device=config.device)
    prompts = random_prompts(1, config.prompt_tokens, MEDIUM[-1])
    params = SamplingParams(max_new_tokens=config.max_new_tokens, ignore_eos=True)
    pair = (model, Numbers())
    eager = LLM(pair, draft="none", compile=False, quantize=config.quantize)
    judge = NearTies(model if eager.target.weights.quantization is None else eager.target, prompts)
    contenders = [Contender("sakiyomi eager", partial(our_lap, eager, prompts, params), judge)]
    compiled = False
    if config.compile:
        row.note("compiling")
        ready = LLM(pair, draft="none", compile=True, quantize=config.quantize)
        if compiled := ready.compiled():
            contenders.insert(0, Contender("sakiyomi compiled", partial(our_lap, ready, prompts, params), judge))
    if config.peers:
        if eager.target.weights.quantization is not None:
            contenders = _among_themselves(contenders)
        theirs = partial(peer_lap, Transformers(model), prompts, params)
        contenders.insert(0, Contender("transformers", theirs, NearTies(model, prompts)))
    return row.row(
        "plain decoding, tokens/s",
        row.race(contenders),
        model=described(model),
        dtype="bfloat16",
        rounding=rounding(eager),
        graphs="compiled and eager" if compiled else "eager",
        **lengths(config, prompts),
    )


def _among_themselves(contenders: Sequence[Contender]) -> list[Contender]:
    """Contenders of one set of weights beside a baseline of another: each is compared with the first of them."""
    return [replace(contender, against=contenders[0].name) for contender in contenders]


def everybody(row: PairRow, llm: LLM, *, peers: Sequence[str] = (), auto: bool = False) -> list[Contender]:
    """The same greedy work: transformers in some of its ``WAYS``, ours plain and speculative.

    With ``auto`` also ours with gamma "auto".
    """
    pair, judge = row.pair, row.pair.judge(llm)
    contenders: list[Contender] = []
    if peers:
        laps = {way: partial(peer_lap, pair.peer(way), pair.prompts, row.params()) for way in peers}
        theirs = [Contender(f"transformers {way}", lap, pair.judge()) for way, lap in laps.items()]
        contenders += pair.quality.grade(theirs, their_logits(pair.target.model))
    runs = {"sakiyomi plain": row.run(EngineView(llm)), "sakiyomi speculative": row.run(llm)}
    if auto:
        runs["sakiyomi, gamma auto"] = row.run(llm, gamma="auto")
    ours = [Contender(name, run, judge) for name, run in runs.items()]
    if peers and llm.target.weights.quantization is not None:
        ours = _among_themselves(ours)
    return contenders + pair.quality.grade(ours, own_logits(llm.target))


def speculative(row: PairRow) -> Row:
    """Our speculation against assisted generation of transformers: same pair, dtype and gamma."""
    llm = row.llm()
    contenders = everybody(row, llm, peers=WAYS if row.config.peers else ())
    # The baseline is what the row is about: assisted generation, if peers are measured.
    contenders.sort(key=lambda contender: contender.name != "transformers assisted")
    return row.row("greedy, one prompt at a time, tokens/s", row.race(contenders), **row.conditions(llm))


def stories(row: PairRow) -> Row:
    """Our speculation against our own plain decoding."""
    llm = row.llm()
    return row.row(
        "greedy against own plain, tokens/s", row.race(everybody(row, llm, auto=True)), **row.conditions(llm)
    )


def batch(row: PairRow) -> Row:
    """Eight requests at once against one at a time, all tokens counted.

    Three times as many wait, so that the eight places are taken nearly to the end: texts need unlike numbers of rounds.
    """
    prompts = (row.pair.prompts * (3 * BATCH))[: 3 * BATCH]
    llm = row.llm(max_batch=BATCH)
    judge = row.pair.judge(llm, prompts)
    contenders = [
        Contender("batch of 1", row.run(llm, prompts=prompts, ignore_eos=True), judge),
        Contender(f"batch of {BATCH}", row.run(llm, prompts=prompts, together=True, ignore_eos=True), judge),
    ]
    standings = row.race(row.pair.quality.grade(contenders, own_logits(llm.target)))
    return row.row("speculative, total tokens/s", standings, **row.conditions(llm, prompts))
