"""Everybody on one pair: transformers, llama.cpp and ourselves, in the pair's dtype and with rounded weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from sakiyomi.core.errors import MemoryLimitError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.bench import llamacpp
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.llamacpp import KINDS, LlamaCpp, gguf_file
from sakiyomi.evaluation.bench.models import WAYS, Pair
from sakiyomi.evaluation.bench.quality import CHUNK, Logits
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, Lap, race, timed
from sakiyomi.evaluation.bench.speed import everybody, pair_conditions
from sakiyomi.kernels.quantization import QUANTIZATIONS

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
    more: dict[str, Callable[[Pair, Note], list[Contender]]] = {}
    left_out = []
    if config.peers:
        absent = llamacpp.missing(gpu=_on_gpu(pair))
        kinds = () if absent else (KINDS[pair.dtypes["dtype"]], *ROUNDED)
        left_out += [f"llama.cpp is left out: {absent}"] if absent else []
        more |= {f"llama.cpp {kind.lower()}": partial(_llamacpp, kind) for kind in kinds}
    more |= {kind: partial(_rounded, kind) for kind in QUANTIZATIONS}
    for name, make in more.items():
        try:
            contenders += make(pair, note)
        except (UnsupportedError, MemoryLimitError) as error:
            left_out.append(f"{name} is left out: {error}")
    standings = race(contenders, repeats=config.repeats, note=note)
    found = of_race("peers", "greedy, one prompt at a time, tokens/s", standings, **pair_conditions(pair, llm))
    return replace(found, notes=[*found.notes, *left_out])


def _llamacpp(kind: str, pair: Pair, note: Note) -> list[Contender]:
    """llama.cpp with weights of one kind, in 8 bits also with its own draft model."""
    note(f"peers: llama.cpp {kind}")
    config, params = pair.config, SamplingParams(max_new_tokens=pair.config.max_new_tokens)
    judge = None if kind in ROUNDED else pair.judge()
    file = gguf_file(pair.target, kind)
    llamacpp.check(file)
    open_ = partial(
        LlamaCpp,
        file,
        max(map(len, pair.prompts)) + config.max_new_tokens,
        pair.stop,
        wide=pair.dtypes["dtype"] == "float32",
        gpu=_on_gpu(pair),
    )
    runs = {f"llama.cpp {kind.lower()} plain": open_()}
    if kind == "Q8_0":
        runs["llama.cpp q8_0 with its draft"] = open_(draft=gguf_file(pair.draft, kind), gamma=config.gamma)
    contenders = [
        Contender(name, partial(_lap, run, pair.prompts, params), judge, against=None if judge else name)
        for name, run in runs.items()
    ]
    return pair.quality.grade(contenders, _logits(partial(LlamaCpp, file, CHUNK, **open_.keywords)))


def _on_gpu(pair: Pair) -> bool:
    return bool(pair.target.model.device.type == "cuda")


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
