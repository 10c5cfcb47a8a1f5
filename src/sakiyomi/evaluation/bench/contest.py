"""transformers, other engines and sakiyomi on the same pair: alone, with many requests and with a long prompt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
import torch.nn.functional as F

from sakiyomi.core.errors import MemoryLimitError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.engines.process import EngineProcess
from sakiyomi.evaluation.bench.engines.registry import ENGINES, OtherEngine, converted_folder, environments
from sakiyomi.evaluation.bench.frame import PairRow, our_lap
from sakiyomi.evaluation.bench.lookup import by_part
from sakiyomi.evaluation.bench.models import WAYS, Pair
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.quality import own_logits, their_logits
from sakiyomi.evaluation.bench.report import Row, joined
from sakiyomi.evaluation.bench.runner import Contender, Lap, Outputs, timed
from sakiyomi.kernels.quantization import QUANTIZATIONS

__all__ = ["Load", "Texts", "peers"]

ALONE, TOGETHER, PROMPT = 4, (8, 32), 900
"""Texts one at a time, requests at once, tokens of a long prompt."""


@dataclass(frozen=True)
class Load:
    """What everybody is asked for: all texts have the same length, whatever the model says about their end.

    Attributes:
        name: as it is shown.
        batches: prompts that are given at once, one batch after the other.
        tokens: new ones of each.
    """

    name: str
    batches: list[list[list[int]]]
    tokens: int

    @property
    def prompts(self) -> list[list[int]]:
        """In the order of the outputs."""
        return list(chain.from_iterable(self.batches))

    @property
    def reads(self) -> bool:
        """It is about reading the prompts: speeds are of their tokens."""
        return self.tokens == 1

    def counted(self, lap: Lap) -> Lap:
        """A lap with the tokens that this load is about."""
        return replace(lap, tokens=sum(map(len, self.prompts))) if self.reads else lap


def loads(row: PairRow) -> Iterator[Load]:
    """All that are measured."""
    pair, tokens = row.pair, row.config.max_new_tokens
    yield Load("1 request", [[prompt] for prompt in _different(pair.prompts, ALONE)], tokens)
    for size in TOGETHER:
        yield Load(f"{size} requests", [_different(pair.prompts, size)], tokens)
    texts = row.config.texts()
    limit = getattr(pair.target.model.config.get_text_config(), "max_position_embeddings", PROMPT + 1)
    most = min(PROMPT, limit - 1)
    long = []
    for i in range(min(len(texts), ALONE)):
        ids = pair.target.tokenizer("\n".join(texts[i:] + texts[:i])).input_ids
        long.append([list(islice(cycle(ids), most))])
    yield Load(f"prompt of {most} tokens", long, 1)


def _different(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """So many prompts, turned by a token each time around: of a common beginning ours would read one."""
    turned = ((prompts[i % len(prompts)], i // len(prompts)) for i in range(count))
    return [prompt[turns % len(prompt) :] + prompt[: turns % len(prompt)] for prompt, turns in turned]


@dataclass
class Texts:
    """What is to be said of texts: the share that is the baseline's own, and how likely the target finds them.

    Attributes:
        model: the target, as transformers runs it.
        load: what was asked for.
    """

    model: Any
    load: Load
    _seen: dict[Outputs, dict[str, float]] = field(default_factory=dict)

    def graded(self, contenders: Sequence[Contender]) -> list[Contender]:
        """The contenders, the baseline first, with these figures in their laps."""

        def run(contender: Contender) -> Lap:
            lap = contender.run()
            return self.load.counted(lap).more(**self.figures(lap.outputs))

        return [replace(contender, run=partial(run, contender)) for contender in contenders]

    def figures(self, outputs: Outputs) -> dict[str, float]:
        """``agreement`` with the first outputs that were ever asked about; ``text_perplexity``, if they are texts."""
        if outputs not in self._seen:
            first = next(iter(self._seen), outputs)
            same = [one == other for one, other in zip(first, outputs, strict=True)]
            found = {"agreement": sum(same) / len(same)}
            self._seen[outputs] = found if self.load.reads else found | {"text_perplexity": self._perplexity(outputs)}
        return self._seen[outputs]

    @torch.no_grad()
    def _perplexity(self, outputs: Outputs) -> float:
        logits, loss = their_logits(self.model), 0.0
        for prompt, text in zip(self.load.prompts, outputs, strict=True):
            rows = logits([*prompt, *text])[len(prompt) - 1 : -1].float()
            loss += float(F.cross_entropy(rows, torch.tensor(text, device=rows.device), reduction="sum"))
        return math.exp(loss / sum(map(len, outputs)))


def peers(row: PairRow) -> Row:
    """Greedy: every program that can run the pair, plain and with drafts, under every load, by the kind of weights.

    An engine that cannot run here, that dies or that is too slow is left out with a note.
    """
    config = row.config
    kinds = (row.pair.dtypes["dtype"], *(QUANTIZATIONS if config.quantize is None else (config.quantize,)))
    parts: dict[str, Row] = {}
    notes: list[str] = []
    conditions: dict[str, Any] = {}
    several = list(loads(row))
    for kind in kinds:
        try:
            row.note(kind)
            how: dict[str, Any] = {"quantize": kind if kind in QUANTIZATIONS else None, "max_batch": max(TOGETHER)}
            llm = row.llm(**how)
        except (UnsupportedError, MemoryLimitError) as error:
            if kind not in QUANTIZATIONS:
                raise
            notes.append(f"sakiyomi {kind} is left out: {error}")
            continue
        with ExitStack() as stack:
            others = _opened(row, kind, several, stack, notes) if config.peers else {}
            conditions |= {f"{name}, {kind}": _said(other.settings) for name, other in others.items()}
            for load in several:
                contenders = _contenders(row, llm, load, others)
                standings = row.race(contenders, where=f"{kind}, {load.name}", lost=notes)
                parts[f"{kind}, {load.name}"] = row.row("", standings)
                speeds = ", ".join(f"{each.name} {statistics.median(each.speeds):.4g}" for each in standings)
                row.say(f"{kind}, {load.name}, tokens/s: {speeds}")
    conditions = row.conditions(llm) | conditions | {"laps": config.repeats} | by_part(parts)
    found = joined("peers", "greedy, tokens/s (of a prompt: its own)", parts, **conditions)
    return replace(found, notes=[*found.notes, *notes])


def _opened(
    row: PairRow, kind: str, several: Sequence[Load], stack: ExitStack, notes: list[str]
) -> dict[str, EngineProcess]:
    """Every engine that can be had with weights of a kind, plain and with the draft, in processes of their own."""
    config, pair = row.config, row.pair
    task = {
        "kind": kind,
        "gamma": config.gamma,
        "threads": torch.get_num_threads(),
        "context": max(len(prompt) + load.tokens for load in several for prompt in load.prompts),
        "requests": max(len(batch) for load in several for batch in load.batches),
        "folder": str(converted_folder()),
    }
    found = {}
    for engine in ENGINES:
        for way in ("plain", "draft model") if engine.drafts else ("plain",):
            name = f"{engine.name} {way}"
            row.note(f"{kind}: opening {name}")
            try:
                found[name] = _open(engine, pair, task, config.environments, drafted=way != "plain")
            except (UnsupportedError, MemoryLimitError) as error:
                notes.append(f"{name}, {kind} is left out: {error}")
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
    model, draft = (str(engine.checkpoint(one, kind)) for one in (pair.target, pair.draft))
    return EngineProcess(engine, environments(folder), {**task, "model": model, "draft": draft if drafted else None})


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _contenders(row: PairRow, llm: LLM, load: Load, others: Mapping[str, EngineProcess]) -> list[Contender]:
    """Transformers in the pair's dtype, the baseline; ours, plain and with its draft; the others."""
    config, pair = row.config, row.pair
    params = SamplingParams(max_new_tokens=load.tokens, gamma=config.gamma, ignore_eos=True)
    contenders = []
    if config.peers:
        ways = WAYS if load.tokens > 1 and max(map(len, load.batches)) == 1 else WAYS[:1]
        runs: dict[str, Callable[[], Lap]] = {
            f"transformers {way}": partial(_their_lap, pair.peer(way), load, params) for way in ways
        }
        theirs = [Contender(name, run, pair.judge(prompts=load.prompts)) for name, run in runs.items()]
        contenders += pair.quality.grade(theirs, their_logits(pair.target.model))
    ways_of_ours: dict[str, tuple[LLM | EngineView, SamplingParams]] = {"sakiyomi plain": (EngineView(llm), params)}
    if not load.reads:
        ways_of_ours |= {
            "sakiyomi speculative": (llm, params),
            "sakiyomi, gamma auto": (llm, replace(params, gamma="auto")),
        }
    judge = pair.judge(llm, load.prompts)
    rounded = "sakiyomi plain" if llm.target.weights.quantization is not None else None
    ours = [
        Contender(name, partial(_our_lap, way, load, own), judge, against=rounded)
        for name, (way, own) in ways_of_ours.items()
    ]
    contenders += pair.quality.grade(ours, own_logits(llm.target))
    contenders += [
        Contender(name, partial(other.lap, load.batches, load.tokens), optional=True)
        for name, other in others.items()
        if other.alive and not (load.reads and other.drafted)
    ]
    return Texts(pair.target.model, load).graded(contenders)


def _their_lap(peer: Transformers, load: Load, params: SamplingParams) -> Lap:
    return timed(lambda: [text for batch in load.batches for text in peer.generate_batch(batch, params)])


def _our_lap(way: Any, load: Load, params: SamplingParams) -> Lap:
    together = max(map(len, load.batches)) > 1
    return our_lap(way, load.prompts, params, together=together)
