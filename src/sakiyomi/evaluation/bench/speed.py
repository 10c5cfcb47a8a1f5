"""Tokens per second: plain and speculative, against transformers and against ourselves, alone and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.hf_generate import custom_generate
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Run, lengths, our_lap, peer_lap
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
from sakiyomi.evaluation.bench.runner import Contender, Spread, Standing, timed

__all__ = ["batch", "dropin", "everybody", "fitting", "plain", "speculative", "stories", "sweep"]

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
    recorded = False
    if config.compile:
        row.note("recording passes")
        ready = LLM(pair, draft="none", quantize=config.quantize)
        if recorded := ready.wait():
            contenders.insert(0, Contender("sakiyomi", partial(our_lap, ready, prompts, params), judge))
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
        graphs=f"{ready.target.mode} and eager" if recorded else "eager",
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

    Three times as many wait, so that the eight slots are taken nearly to the end: texts need unlike numbers of rounds.
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


def sweep(row: PairRow) -> Row:
    """So many requests at once, no others waiting; plain and speculative take turns at each size, on one target.

    A size pays if speculation has more total tokens/s than plain generation, by more than two equal things differ.
    Latency is the median over requests of the time from a request's start to its last token.
    """
    config, sizes = row.config, sorted(set(row.config.batch_sizes))
    llm = row.llm(max_batch=sizes[-1])
    ways = {"plain": EngineView(llm), "speculative": llm}
    everyone = list(islice(cycle(row.pair.prompts), sizes[-1]))
    judge = row.pair.judge(llm, everyone)
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    for size in fitting(sizes, llm, max(map(len, everyone)) + config.max_new_tokens, notes):
        runs = {
            name: row.run(way, prompts=everyone[:size], together=True, ignore_eos=True) for name, way in ways.items()
        }
        standings = row.race(runs, judge, where=f"batch of {size}")
        lines.append(_line(size, standings))
        notes += [f"batch of {size}: {found.agreement.note}" for found in standings if found.agreement.note]
    notes.append(_mark(lines))
    conditions = row.conditions(llm, graphs_up_to_rows=llm.target.sizes[-1], laps=config.repeats)
    conditions.pop("perplexity_of", None)  # the same at every size: not measured here
    return Row("sweep", "total tokens/s and seconds a request, by requests at once", lines, conditions, notes)


def fitting(sizes: Sequence[int], llm: LLM, tokens: int, notes: list[str]) -> Iterator[int]:
    """Sizes of batches for which there is memory, ascending; where it ends, a note says so.

    Args:
        sizes: to be tried, ascending.
        llm: whose cache it is.
        tokens: of each text, with its prompt.
        notes: of the row.
    """
    for size in sizes:
        try:
            llm.target.cache.check(size, tokens)
        except MemoryLimitError as error:
            notes.append(f"batch of {size} and above: {error}")
            return
        yield size


def _line(size: int, standings: Sequence[Standing]) -> dict[str, Any]:
    plain, speculative = (standing.to_dict() for standing in standings)
    line: dict[str, Any] = {"batch": size}
    for figure in ("tokens_per_second", "low", "high", "latency_seconds"):
        line |= {f"plain_{figure}": plain[figure], f"speculative_{figure}": speculative[figure]}
    spread, ratio = Spread.of(standings), speculative["ratio"]
    pays = None
    if ratio is not None:
        pays = "even" if spread is not None and ratio in spread else "yes" if ratio > 1 else "no"
    return line | {
        "ratio": ratio,
        "A/A": spread and str(spread),
        "tau": speculative["tau"],
        "kv_bytes": speculative["kv_bytes"],
        "pays": pays,
        "stops": False,
        "equal": speculative["equal"],
    }


def _mark(lines: Sequence[dict[str, Any]]) -> str:
    """Mark the first size at which speculation is slower than plain generation; a sentence about it."""
    stop = next((i for i, line in enumerate(lines) if line["pays"] == "no"), len(lines))
    paid = max((line["batch"] for line in lines[:stop] if line["pays"] == "yes"), default=None)
    before = "" if paid is None else f"pays up to a batch of {paid} and "
    if stop == len(lines):
        return f"speculation {before}is slower at no size"
    lines[stop]["stops"] = True
    return f"speculation {before}is slower at {lines[stop]['batch']} (ratio {lines[stop]['ratio']:.2f})"


def dropin(row: PairRow) -> Row:
    """Greedy, with the same draft model: assisted generation by our gamma and by its own settings, plain, our loop."""
    pair, config = row.pair, row.config
    model, draft = pair.target.model, pair.draft.model
    loop = custom_generate.using(compile="auto" if config.compile else False)
    row.note("recording passes")
    loop.prepare(model, draft)
    params = row.params()
    peer = partial(Transformers, model, stop=pair.stop)
    ours = peer(draft, None, loop=loop)
    ways = {f"transformers assisted, {config.gamma} tokens": peer(draft, config.gamma)}
    ways |= {"transformers assisted": peer(draft, None), "transformers plain": peer(None)} if config.peers else {}
    ways |= {
        f"custom_generate, gamma {config.gamma}": peer(draft, None, loop=loop.using(gamma=config.gamma)),
        "custom_generate": ours,
    }
    runs: dict[str, Run] = {name: partial(peer_lap, way, pair.prompts, params) for name, way in ways.items()}
    together = f"custom_generate, batch of {len(pair.prompts)}"
    runs[together] = lambda: timed(lambda: ours.generate_batch(pair.prompts, params))
    standings = row.race(runs, pair.judge())
    conditions = {
        **pair.names,
        **pair.dtypes,
        "gamma": config.gamma,
        "graphs": "recorded" if config.compile else "eager",
        "prompts": len(pair.prompts),
        "max_new_tokens": config.max_new_tokens,
    }
    return row.row("greedy, model.generate with one loop and another, tokens/s", standings, **conditions)
