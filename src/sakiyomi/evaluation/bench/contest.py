"""transformers, llama.cpp and sakiyomi on the same pair, in the pair's dtype and with quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from sakiyomi.core.errors import MemoryLimitError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.bench import llamacpp
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.llamacpp import KINDS, LlamaCpp, gguf_file
from sakiyomi.evaluation.bench.models import WAYS, Pair
from sakiyomi.evaluation.bench.quality import CHUNK, Logits
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Contender, Lap, timed
from sakiyomi.evaluation.bench.speed import everybody
from sakiyomi.kernels.quantization import QUANTIZATIONS

__all__ = ["peers"]

QUANTIZED = ("Q8_0", "Q4_0")


def peers(row: PairRow) -> Row:
    """Greedy text, one prompt at a time: every program that can run the pair, plain and with drafts.

    A program that cannot run here, for lack of a package or of memory, is left out with a note.
    """
    llm = row.llm(quantize=None)
    contenders = everybody(row, llm, peers=WAYS if row.config.peers else ())
    more: dict[str, Callable[[PairRow], list[Contender]]] = {}
    left_out = []
    if row.config.peers:
        absent = llamacpp.missing(gpu=_on_gpu(row.pair))
        kinds = () if absent else (KINDS[row.pair.dtypes["dtype"]], *QUANTIZED)
        left_out += [f"llama.cpp is left out: {absent}"] if absent else []
        more |= {f"llama.cpp {kind.lower()}": partial(_llamacpp, kind) for kind in kinds}
    more |= {kind: partial(_quantized, kind) for kind in QUANTIZATIONS}
    for name, make in more.items():
        try:
            row.note(name)
            contenders += make(row)
        except (UnsupportedError, MemoryLimitError) as error:
            left_out.append(f"{name} is left out: {error}")
    standings = row.race(contenders)
    return row.row("greedy, one prompt at a time, tokens/s", standings, notes=left_out, **row.conditions(llm))


def _llamacpp(kind: str, row: PairRow) -> list[Contender]:
    """llama.cpp with weights of one kind, in 8 bits also with its own draft model."""
    pair, config, params = row.pair, row.config, row.params()
    judge = None if kind in QUANTIZED else pair.judge()
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
    return lap.more(tau=(lap.tokens - len(prompts)) / rounds) if rounds else lap


def _quantized(kind: str, row: PairRow) -> list[Contender]:
    """Our engine with quantized weights: the drafted text has to be the plain text of the same weights."""
    ours = everybody(row, row.llm(quantize=kind))
    return [
        replace(contender, name=f"{contender.name}, {kind}", against=f"{ours[0].name}, {kind}") for contender in ours
    ]
