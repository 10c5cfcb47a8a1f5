"""Row ``kinds``: a model by kinds of weights and of prompts, beside other programs that run it."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from sakiyomi.core.chats import Chat
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.errors import MemoryLimitError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.card import has_draft_model
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.contest import Load, opened
from sakiyomi.evaluation.bench.engines.process import EngineProcess, python_of
from sakiyomi.evaluation.bench.engines.registry import ENGINES, OtherEngine, environments
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, Run, declared, generated
from sakiyomi.evaluation.bench.models import WAYS
from sakiyomi.evaluation.bench.own_model import PLAIN, TITLE, as_tokens, own_prompts, ways
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.runner import Contender, Standing, TimedRun, timed
from sakiyomi.kernels.quantization import QUANTIZATIONS
from sakiyomi.model_executor.weights import rounding_of

GGUF = "gguf"
WARM = 8
"""Tokens that each contender writes before a race: a whole run would take as long as what is measured."""


@dataclass(frozen=True)
class Texts:
    """Texts of one kind of prompts, one request at a time; each has a length of its own.

    Attributes:
        prompts: token ids.
        lengths: new tokens of each.
    """

    prompts: Sequence[list[int]]
    lengths: Sequence[int]

    def params(self, **more: Any) -> list[SamplingParams]:
        """Of each text; end tokens are ignored, so that every contender writes as many tokens."""
        return [SamplingParams(max_new_tokens=length, ignore_eos=True, **more) for length in self.lengths]

    def ours(self, way: Any) -> TimedRun:
        """Run an ``LLM`` or an ``EngineView``."""
        calls = [([prompt], params) for prompt, params in zip(self.prompts, self.params(gamma="auto"), strict=True)]
        return generated(way, calls)[0]

    def transformers(self, peer: Transformers) -> TimedRun:
        """Run transformers."""
        return timed(lambda: list(map(peer.generate, self.prompts, self.params())))

    def engine(self, process: EngineProcess) -> TimedRun:
        """Run another engine."""
        runs = [process.run([[prompt]], length) for prompt, length in zip(self.prompts, self.lengths, strict=True)]
        outputs = tuple(output for run in runs for output in run.outputs)
        return TimedRun(sum(run.seconds for run in runs), sum(run.tokens for run in runs), outputs)


@declared(f"{TITLE}, by kind of prompts")
def kinds(row: PairRow) -> Races:
    """A model by kinds of weights and of prompts: every program that runs it, plain and with drafts.

    Our plain texts, up to their end tokens, set the lengths for each kind of weights. ``ratio``: the geometric mean
    over the kinds of prompts of the speed-up over transformers; with other weights, over our own plain decoding.
    """
    config, conditions = row.config, dict[str, Any]()
    weights = (dtype_name(row.pair.target.model.dtype), *((config.quantize,) if config.quantize else QUANTIZATIONS))
    parts = [(row, kind) for kind in weights]
    if config.gguf is not None:
        parts.append((row.changed(target=config.gguf, gguf=None), GGUF))
    installed = _installed(row) if config.peers else []
    for part, kind in parts:
        try:
            row.note(f"{kind}: loading")
            llm = part.pair.llm(config.draft, quantize=kind if kind in QUANTIZATIONS else None)
        except (UnsupportedError, MemoryLimitError) as error:
            if kind == weights[0]:
                raise
            row.notes.append(f"sakiyomi {kind} is left out: {error}")
            continue
        found = yield from _races(part, llm, kind, installed, conditions)
        row.lines += pivoted(found, format=(rounding_of(llm.target.weights) or kind) if kind == GGUF else kind)
        row.notes += part.notes if part is not row else []
    prompts = _prompts(config, llm)
    more = {"gamma": f"auto (transformers: {config.gamma})", "draft": config.draft, "gguf": config.gguf}
    row.notes = list(dict.fromkeys(row.notes))
    more |= {"rounding": None}  # of several formats
    more["prompts"] = ", ".join(f"{name} {len(several)}" for name, several in prompts.items())
    return row.conditions(llm, [ids for several in prompts.values() for ids in several], alone=True) | more | conditions


def _installed(row: PairRow) -> list[OtherEngine]:
    """Engines that have an environment here; a note on each other one."""
    found = []
    for engine in ENGINES:
        try:
            python_of(engine, environments(row.config.environments))
        except UnsupportedError as error:
            row.notes.append(f"{engine.name} is left out: {error}")
        else:
            found.append(engine)
    return found


def _fitting(installed: Sequence[OtherEngine], kind: str, dtype: str) -> list[OtherEngine]:
    """Engines that run such weights; a GGUF file is run by llama.cpp alone."""
    return [one for one in installed if (one.key == "llamacpp" if kind == GGUF else dtype in one.kinds)]


def _prompts(config: BenchConfig, llm: LLM) -> dict[str, list[list[int]]]:
    """Token ids of the prompts of each kind."""
    asked: Mapping[str, Sequence[str | Chat]] = config.kinds() or own_prompts()
    return {name: as_tokens(llm, several, config.max_new_tokens) for name, several in asked.items()}


def _races(
    row: PairRow, llm: LLM, kind: str, installed: Sequence[OtherEngine], conditions: dict[str, Any]
) -> Generator[Race, list[Standing], dict[str, list[Standing]]]:
    """Races with one kind of weights, one for each kind of prompts; their standings by its name."""
    config, several = row.config, ways(llm)
    asked = _prompts(config, llm)
    if config.compile:
        row.note(f"{kind}: recording passes")
        llm.wait()
    params, lengths = row.params(gamma="auto"), dict[str, list[int]]()
    for name, prompts in asked.items():
        row.note(f"{kind}, {name}: plain texts")
        run, _ = generated(several[PLAIN], [([prompt], params) for prompt in prompts])
        lengths[name] = list(map(len, run.outputs))
    loads = [Load(name, prompts, max(lengths[name])) for name, prompts in asked.items()]
    found = {}
    with ExitStack() as stack:
        dtype = dtype_name(llm.target.dtype) if kind == GGUF else kind
        drafted = ("plain", "draft model") if has_draft_model(config) and kind != GGUF else ("plain",)
        others = opened(row, dtype, loads, stack, _fitting(installed, kind, dtype), drafted)
        for name, other in others.items():
            conditions[f"{name}, {kind}"] = ", ".join(f"{key} {value}" for key, value in other.settings.items())
        for name, prompts in asked.items():
            where = f"{kind}, {name}"
            contenders = partial(_contenders, row, llm, several, others, kind)
            for one in contenders(Texts(prompts[:1], [WARM])):
                row.note(f"{where}, warming up: {one.name}")
                with suppress(UnsupportedError):  # the race tells of an engine that fails
                    one.run()
            texts = Texts(prompts, lengths[name])
            found[name] = yield Race(contenders(texts), where=where, lines=lambda standings: (), warm_up=0)
            speeds = ", ".join(f"{each.name} {statistics.median(each.speeds):.4g}" for each in found[name])
            row.say(f"{where}, tokens/s: {speeds}")
    return found


def _contenders(
    row: PairRow,
    llm: LLM,
    several: Mapping[str, Any],
    others: Mapping[str, EngineProcess],
    kind: str,
    texts: Texts,
) -> list[Contender]:
    """Transformers with its own weights, the baseline; ours; other engines."""
    theirs: dict[str, Run] = {}
    if row.config.peers and kind not in (*QUANTIZATIONS, GGUF):
        named = [way for way in WAYS if way != "assisted" or has_draft_model(row.config)]
        theirs = {f"transformers {way}": partial(texts.transformers, row.pair.peer(way)) for way in named}
    ours: dict[str, Run] = {f"sakiyomi {name}": partial(texts.ours, way) for name, way in several.items()}
    engines = [
        Contender(name, partial(texts.engine, other), optional=True) for name, other in others.items() if other.alive
    ]
    return [*row.contenders(llm, ours, theirs, texts.prompts), *engines]


def pivoted(found: Mapping[str, Sequence[Standing]], **first: Any) -> list[dict[str, Any]]:
    """A line for each contender, with a column for each kind of prompts.

    Args:
        found: standings by kind of prompts.
        first: columns in front.
    """
    each: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, standings in found.items():
        for standing in standings:
            each.setdefault(standing.name, {})[kind] = standing.to_dict()
    lines = []
    for name, own in each.items():
        ratios = [line["ratio"] for line in own.values()]
        same = [line["equal"] for line in own.values()]
        taus = [line["tau"] for line in own.values() if "tau" in line]
        lines.append(
            {
                **first,
                "name": name,
                **{f"{kind}_tokens_per_second": own.get(kind, {}).get("tokens_per_second") for kind in found},
                "ratio": statistics.geometric_mean(ratios) if len(ratios) == len(found) and all(ratios) else None,
                "tau": statistics.fmean(taus) if taus else None,
                "equal": None if None in same else all(same),
                "by_category": own,
            }
        )
    return lines
