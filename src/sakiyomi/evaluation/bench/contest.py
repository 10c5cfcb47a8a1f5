"""transformers, other engines and sakiyomi on the same pair: alone, with many requests and with a long prompt."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from sakiyomi.core.errors import LoadError, MemoryLimitError, UnsupportedError
from sakiyomi.core.prompts import text_of
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.reference import HFReference
from sakiyomi.evaluation.bench.engines.process import EngineProcess
from sakiyomi.evaluation.bench.engines.registry import ENGINES, OtherEngine, converted_folder, environments
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, Run, declared, run_peer
from sakiyomi.evaluation.bench.models import WAYS, Pair
from sakiyomi.evaluation.bench.quality import perplexity
from sakiyomi.evaluation.bench.runner import Contender, Outputs
from sakiyomi.kernels.quantization import QUANTIZATIONS

ALONE, TOGETHER, PROMPT = 4, (8, 32), 900
"""Texts one at a time, requests at once, tokens of a long prompt."""


@dataclass(frozen=True)
class Load:
    """The work of every contender: texts of one length; end tokens are ignored.

    Attributes:
        name: as it is shown.
        prompts: token ids.
        tokens: new tokens of each; with 1 the prefill is measured, and speeds count the prompts' tokens.
        together: all prompts at once; otherwise one after the other.
    """

    name: str
    prompts: list[list[int]]
    tokens: int
    together: bool = False

    @property
    def reads(self) -> bool:
        """Whether it measures the prefill."""
        return self.tokens == 1

    def counted(self, run: Run) -> Run:
        """The run, with the number of tokens that this load is about."""
        return (lambda: replace(run(), tokens=sum(map(len, self.prompts)))) if self.reads else run

    def raced(self, others: Mapping[str, EngineProcess]) -> list[Contender]:
        """Contenders of the other engines that still run, with this load."""
        batches = [self.prompts] if self.together else [[prompt] for prompt in self.prompts]
        return [
            Contender(name, partial(other.run, batches, self.tokens), optional=True)
            for name, other in others.items()
            if other.alive and not (self.reads and other.drafted)
        ]


def loads(row: PairRow) -> Iterator[Load]:
    """The loads that row ``peers`` measures."""
    pair, tokens = row.pair, row.config.max_new_tokens
    yield Load("1 request", _different(pair.prompts, ALONE), tokens)
    for size in TOGETHER:
        yield Load(f"{size} requests", _different(pair.prompts, size), tokens, together=True)
    texts = list(map(text_of, row.config.texts()))
    limit = getattr(pair.target.model.config.get_text_config(), "max_position_embeddings", PROMPT + 1)
    most = min(PROMPT, limit - 1)
    long = []
    for i in range(min(len(texts), ALONE)):
        ids = pair.target.tokenizer("\n".join(texts[i:] + texts[:i])).input_ids
        long.append(list(islice(cycle(ids), most)))
    yield Load(f"prompt of {most} tokens", long, 1)


def _different(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """So many prompts; repeated ones are rotated by a token, because our engine would prefill a shared prefix once."""
    turned = ((prompts[i % len(prompts)], i // len(prompts)) for i in range(count))
    return [prompt[turns % len(prompt) :] + prompt[: turns % len(prompt)] for prompt, turns in turned]


@dataclass
class Texts:
    """Figures of texts: the share that equals the baseline's, and their perplexity under the target.

    Attributes:
        model: the target, as transformers runs it.
        load: what was asked for.
    """

    model: Any
    load: Load
    _seen: dict[Outputs, dict[str, float]] = field(default_factory=dict)

    def figures(self, outputs: Outputs) -> dict[str, float]:
        """``agreement`` with the outputs of the first call; ``text_perplexity``, unless the prefill is measured."""
        if outputs not in self._seen:
            first = next(iter(self._seen), outputs)
            same = [one == other for one, other in zip(first, outputs, strict=True)]
            found = {"agreement": sum(same) / len(same)}
            if not self.load.reads:
                texts = zip(self.load.prompts, outputs, strict=True)
                found["text_perplexity"] = perplexity(HFReference(self.model).logits, texts)
            self._seen[outputs] = found
        return self._seen[outputs]


@declared("greedy, tokens/s (of a prompt: its own)")
def peers(row: PairRow) -> Races:
    """Greedy: every program that runs the pair, plain and with drafts, at every load, by the kind of weights.

    An engine that cannot run here, that dies or that is too slow is left out with a note.
    """
    config, several = row.config, list(loads(row))
    conditions: dict[str, Any] = {}
    for kind in (row.pair.dtypes["dtype"], *(QUANTIZATIONS if config.quantize is None else (config.quantize,))):
        try:
            row.note(kind)
            llm = row.llm(quantize=kind if kind in QUANTIZATIONS else None, max_batch=max(TOGETHER))
        except (UnsupportedError, MemoryLimitError) as error:
            if kind not in QUANTIZATIONS:
                raise
            row.notes.append(f"sakiyomi {kind} is left out: {error}")
            continue
        with ExitStack() as stack:
            others = opened(row, kind, several, stack, ENGINES) if config.peers else {}
            for name, other in others.items():
                conditions[f"{name}, {kind}"] = ", ".join(f"{key} {value}" for key, value in other.settings.items())
            for load in several:
                where = f"{kind}, {load.name}"
                standings = yield Race(_contenders(row, llm, load, others), where=where)
                speeds = ", ".join(f"{each.name} {statistics.median(each.speeds):.4g}" for each in standings)
                row.say(f"{where}, tokens/s: {speeds}")
    return row.conditions(llm) | conditions


def opened(
    row: PairRow,
    kind: str,
    several: Sequence[Load],
    stack: ExitStack,
    engines: Sequence[OtherEngine],
    ways: Sequence[str] = ("plain", "draft model"),
) -> dict[str, EngineProcess]:
    """Start the engines that run here with this kind of weights, each in a process of its own; a note on the others.

    Args:
        row: about the pair.
        kind: of weights: a name of torch's dtypes, int8 or int4.
        several: their loads.
        stack: closes them.
        engines: to be opened.
        ways: with the pair's draft model, or without; names say which, unless there is one way.
    """
    task = {
        "kind": kind,
        "gamma": row.config.gamma,
        "threads": torch.get_num_threads(),
        "context": max(len(prompt) + load.tokens for load in several for prompt in load.prompts),
        "requests": max(len(load.prompts) if load.together else 1 for load in several),
        "folder": str(converted_folder()),
    }
    found = {}
    for engine in engines:
        for way in ways if engine.drafts else ways[:1]:
            name, where = (f"{engine.name} {way}", f", {kind}") if len(ways) > 1 else (engine.name, "")
            row.note(f"{kind}: opening {name}")
            try:
                found[name] = _open(engine, row.pair, task, row.config.environments, drafted=way != "plain")
            except (LoadError, UnsupportedError, MemoryLimitError) as error:
                row.notes.append(f"{name}{where} is left out: {error}")
            else:
                stack.callback(found[name].close)
    return found


def _open(
    engine: OtherEngine, pair: Pair, task: Mapping[str, Any], folder: str | None, *, drafted: bool
) -> EngineProcess:
    kind = task["kind"]
    if kind not in engine.kinds:
        raise UnsupportedError(f"it runs {', '.join(engine.kinds)} here")
    if pair.target.model.device.type != "cpu":
        raise UnsupportedError("it is measured on the CPU alone; pass device cpu")
    model = str(engine.checkpoint(pair.target, kind))
    draft = str(engine.checkpoint(pair.draft, kind)) if drafted else None
    return EngineProcess(engine, environments(folder), {**task, "model": model, "draft": draft})


def _contenders(row: PairRow, llm: LLM, load: Load, others: Mapping[str, EngineProcess]) -> list[Contender]:
    """Transformers in the pair's dtype, the baseline; ours, plain and with its draft; the others."""
    more: dict[str, Any] = {"max_new_tokens": load.tokens, "ignore_eos": True}
    prompts, together = load.prompts, load.together
    theirs: dict[str, Run] = {}
    if row.config.peers:
        ways = WAYS[:1] if load.reads or together else WAYS
        peers = {f"transformers {way}": row.pair.peer(way) for way in ways}
        params = row.params(**more)
        theirs = {name: partial(run_peer, peer, prompts, params, together=together) for name, peer in peers.items()}
    ours = {"sakiyomi plain": row.run(EngineView(llm), prompts=prompts, together=together, **more)}
    if not load.reads:
        ours["sakiyomi speculative"] = row.run(llm, prompts=prompts, together=together, **more)
        ours["sakiyomi, gamma auto"] = row.run(llm, prompts=prompts, together=together, gamma="auto", **more)
    texts = Texts(row.pair.target.model, load)
    return [
        replace(contender, run=load.counted(contender.run)).figured(lambda run: texts.figures(run.outputs))
        for contender in (*row.contenders(llm, ours, theirs, prompts), *load.raced(others))
    ]
