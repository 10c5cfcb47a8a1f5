"""Everybody on one pair: transformers, llama.cpp and ourselves, in the pair's dtype and with rounded weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from sakiyomi.bench import llamacpp
from sakiyomi.bench.config import BenchConfig, Note
from sakiyomi.bench.llamacpp import KINDS, LlamaCpp, gguf_file
from sakiyomi.bench.models import WAYS, Pair
from sakiyomi.bench.quality import CHUNK, Logits
from sakiyomi.bench.report import Row, of_race
from sakiyomi.bench.runner import Contender, Judge, Lap, race, timed
from sakiyomi.bench.speed import everybody, pair_conditions
from sakiyomi.errors import MemoryLimitError, UnsupportedError
from sakiyomi.kernels.rounding import ROUNDINGS
from sakiyomi.params import SamplingParams

__all__ = ["peers"]

ROUNDED = ("Q8_0", "Q4_0")


def peers(config: BenchConfig, note: Note) -> Row:
    """Greedy text, one prompt at a time: whoever can run the pair, plain and with drafts.

    What cannot run here, for a package or for memory, is left out with a note.
    """
    pair = Pair(config)
    note("peers: compiling")
    llm = pair.llm(quantize=None)
    contenders = everybody(pair, llm, peers=WAYS if config.peers else ())
    more: dict[str, Callable[[Pair, Note], list[Contender]]] = {"llama.cpp": _llamacpp} if config.peers else {}
    more |= {kind: partial(_rounded, kind) for kind in ROUNDINGS}
    left_out = []
    for name, make in more.items():
        try:
            contenders += make(pair, note)
        except (UnsupportedError, MemoryLimitError) as error:
            left_out.append(f"{name} is left out: {error}")
    standings = race(contenders, repeats=config.repeats, note=note)
    found = of_race("peers", "greedy, one prompt at a time, tokens/s", standings, **pair_conditions(pair, llm))
    return replace(found, notes=[*found.notes, *left_out])


def _llamacpp(pair: Pair, note: Note) -> list[Contender]:
    """llama.cpp in the pair's dtype, with its two common roundings, and with its own draft model."""
    gpu = pair.target.model.device.type == "cuda"
    absent = llamacpp.missing(gpu=gpu)
    if absent:
        raise UnsupportedError(absent)
    config, dtype = pair.config, pair.dtypes["dtype"]
    context = max(map(len, pair.prompts)) + config.max_new_tokens
    open_ = partial(LlamaCpp, context=context, stop=pair.stop, wide=dtype == "float32", gpu=gpu)

    def contender(name: str, run: LlamaCpp, judge: Judge | None = None) -> Contender:
        params = SamplingParams(max_new_tokens=config.max_new_tokens)
        return Contender(name, partial(_lap, run, pair.prompts, params), judge, against=None if judge else name)

    plain, drafted = [], []
    for kind in (KINDS[dtype], *ROUNDED):
        note(f"peers: llama.cpp {kind}")
        file = gguf_file(pair.target, kind)
        ways = [contender(f"llama.cpp {kind.lower()} plain", open_(file), None if kind in ROUNDED else pair.judge())]
        if kind == "Q8_0":
            run = open_(file, draft=gguf_file(pair.draft, kind), gamma=config.gamma)
            ways.append(contender("llama.cpp q8_0 with its draft", run))
        first, *others = pair.quality.grade(ways, _logits(partial(open_, file, context=CHUNK)))
        plain.append(first)
        drafted += others
    return plain + drafted


def _logits(open_: Callable[..., LlamaCpp]) -> Logits:
    """By llama.cpp's own passes. Opened when it is asked, which it is only where there is a held-out text."""
    opened: list[LlamaCpp] = []

    def logits(tokens: Sequence[int]) -> Tensor:
        if not opened:
            opened.append(open_(every=True))
        return opened[0].logits(tokens)

    return logits


def _lap(run: LlamaCpp, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Lap:
    before = run.rounds
    lap = timed(lambda: [run.generate(prompt, params) for prompt in prompts])
    rounds = run.rounds - before
    # The first token of each text is the prompt's.
    return replace(lap, figures={"tau": (lap.tokens - len(prompts)) / rounds}) if rounds else lap


def _rounded(kind: str, pair: Pair, note: Note) -> list[Contender]:
    """Ourselves with rounded weights: the drafted text has to be the plain one of the same weights."""
    note(f"peers: {kind}")
    ours = everybody(pair, pair.llm(quantize=kind))
    return [
        replace(contender, name=f"{contender.name}, {kind}", against=f"{ours[0].name}, {kind}") for contender in ours
    ]
