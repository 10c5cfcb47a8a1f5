"""Everybody on one pair: transformers, llama.cpp and ourselves, in the pair's dtype and with rounded weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from sakiyomi.bench import llamacpp
from sakiyomi.bench.config import BenchConfig, Note
from sakiyomi.bench.llamacpp import KINDS, LlamaCpp, gguf_file
from sakiyomi.bench.models import WAYS, Pair
from sakiyomi.bench.report import Row, of_race
from sakiyomi.bench.runner import Contender, Judge, Lap, race, timed
from sakiyomi.bench.speed import everybody, our_lap, pair_conditions
from sakiyomi.bench.undrafted import Undrafted
from sakiyomi.errors import MemoryLimitError, UnsupportedError
from sakiyomi.params import SamplingParams

__all__ = ["peers"]

OTHER = " (other weights)"
"""After the name of a contender whose weights are rounded: its texts are its own."""
COMPARED = "with the first line; speculative, int8 with plain, int8; others of other weights with nobody"
ROUNDED = ("Q8_0", "Q4_0")


def peers(config: BenchConfig, note: Note) -> Row:
    """Greedy text, one prompt at a time: whoever can run the pair, plain and with drafts.

    What cannot run here, for a package or for memory, is left out with a note.
    """
    pair = Pair(config)
    note("peers: compiling")
    llm = pair.llm()
    contenders = everybody(pair, llm, peers=WAYS if config.peers else ())
    more: dict[str, Callable[[Pair, Note], list[Contender]]] = {"int8": _int8}
    if config.peers:
        more = {"llama.cpp": _llamacpp} | more
    left_out = []
    for name, make in more.items():
        try:
            contenders += make(pair, note)
        except (UnsupportedError, MemoryLimitError) as error:
            left_out.append(f"{name} is left out: {error}")
    standings = race(contenders, repeats=config.repeats, note=note)
    conditions = pair_conditions(pair, llm) | {"compared": COMPARED}
    found = of_race("peers", "greedy, one prompt at a time, tokens/s", standings, **conditions)
    return dataclasses.replace(found, notes=[*found.notes, *left_out])


def _params(config: BenchConfig) -> SamplingParams:
    return SamplingParams(max_new_tokens=config.max_new_tokens, gamma=config.gamma)


def _llamacpp(pair: Pair, note: Note) -> list[Contender]:
    """llama.cpp in the pair's dtype, with its two common roundings, and with its own draft model."""
    absent = llamacpp.missing()
    if absent:
        raise UnsupportedError(absent)
    config, dtype = pair.config, pair.dtypes["dtype"]
    context = max(map(len, pair.prompts)) + config.max_new_tokens
    open_ = partial(LlamaCpp, context=context, stop=pair.stop, wide=dtype == "float32")

    def contender(name: str, run: LlamaCpp, judge: Judge | None = None) -> Contender:
        return Contender(name, partial(_lap, run, pair.prompts, _params(config)), judge)

    found = []
    for kind in (KINDS[dtype], *ROUNDED):
        note(f"peers: llama.cpp {kind}")
        run, name = open_(gguf_file(pair.target, kind)), f"llama.cpp {kind.lower()} plain"
        found.append(contender(name + OTHER, run) if kind in ROUNDED else contender(name, run, pair.judge()))
    drafted = open_(gguf_file(pair.target, "Q8_0"), draft=gguf_file(pair.draft, "Q8_0"), gamma=config.gamma)
    return [*found, contender("llama.cpp q8_0 with its draft" + OTHER, drafted)]


def _lap(run: LlamaCpp, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Lap:
    before = run.rounds
    lap = timed(lambda: [run.generate(prompt, params) for prompt in prompts])
    rounds = run.rounds - before
    # The first token of each text is the prompt's.
    return dataclasses.replace(lap, figures={"tau": (lap.tokens - len(prompts)) / rounds}) if rounds else lap


def _int8(pair: Pair, note: Note) -> list[Contender]:
    """Ourselves with weights of 8 bits: the drafted text has to be the plain one.

    Where they part, the weights before rounding say whether it is a near-tie: transformers has no others.
    """
    note("peers: int8")
    llm = pair.llm(quantize="int8")
    params, plain = _params(pair.config), "sakiyomi plain, int8" + OTHER
    return [
        Contender(plain, partial(our_lap, Undrafted(llm), pair.prompts, params)),
        Contender(
            "sakiyomi speculative, int8" + OTHER,
            partial(our_lap, llm, pair.prompts, params),
            pair.judge(),
            reference=plain,
        ),
    ]
