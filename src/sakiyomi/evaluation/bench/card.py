"""One target on one machine, in a minute: plain, drafted, transformers, llama.cpp; as a row, or a page to send back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sakiyomi.core.draft_specs import split_spec
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.embedded import DRAFTS
from sakiyomi.core.errors import LoadError, MemoryLimitError, UnsupportedError
from sakiyomi.core.files import whole_file
from sakiyomi.core.memory import peak_bytes
from sakiyomi.engine import machine
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, CardConfig, Note
from sakiyomi.evaluation.bench.engines.process import EngineProcess
from sakiyomi.evaluation.bench.engines.registry import ENGINES, converted_folder, environments
from sakiyomi.evaluation.bench.frame import PairRow, our_lap, peer_lap
from sakiyomi.evaluation.bench.models import rounding
from sakiyomi.evaluation.bench.report import Row, condition_line
from sakiyomi.evaluation.bench.runner import Contender

__all__ = ["card", "minute"]

FORMAT = 1
LAPS_UNTIL = 40.0
"""Seconds after which no further lap begins."""
_SHOWN = ("name", "tokens_per_second", "low", "high", "ratio", "tau", "acceptance_rate", "kv_bytes", "equal")


def minute(row: PairRow) -> Row:
    """Greedy, one prompt at a time: transformers, and ours plain and with the draft, whichever kind it is."""
    config = row.config
    row.note(f"loading {config.target}")
    llm = row.pair.llm(config.draft)
    title = "the one-minute table: greedy, one prompt at a time, tokens/s; --rows all for everything"
    return _measured(row, llm, title)


def card(config: CardConfig, note: Note) -> dict[str, Any]:
    """Measure a target, and write one page and one JSON file about it.

    Returns:
        What the JSON file holds, with the names of both files.

    Raises:
        LoadError: they cannot be written.
    """
    began = time.perf_counter()
    wanted = BenchConfig(
        target=config.target,
        draft=config.draft,
        dtype=config.dtype,
        device=config.device,
        quantize=config.quantize,
        prompts=config.prompts,
        count=config.count,
        max_new_tokens=config.max_new_tokens,
        repeats=config.repeats,
        environments=config.environments,
    )
    row = PairRow("card", wanted, note)
    note(f"loading {config.target}")
    llm = row.pair.llm(config.draft)
    table = _measured(row, llm, "greedy, one prompt at a time, tokens/s", others=True)
    target = row.pair.target
    found = {
        "format": FORMAT,
        "machine": machine.describe() | {"bandwidth_bytes_per_second": machine.bandwidth()},
        "model": {
            "name": config.target,
            "class": type(target.model).__name__,
            "parameters": _parameters(target.model),
        },
        "draft": _draft(config.draft, llm),
        "row": table.to_dict(),
        "process_peak_bytes": peak_bytes(),
        "seconds": time.perf_counter() - began,
    }
    page, data = (Path(f"{config.out}.{ending}").expanduser() for ending in ("md", "json"))
    for path, text in ((page, _page(found, table)), (data, json.dumps(found, indent=1, default=str) + "\n")):
        with whole_file(path, "name another place with --out") as fresh:
            fresh.write_text(text, encoding="utf-8")
    return found | {"page": str(page), "json": str(data)}


def _measured(row: PairRow, llm: LLM, title: str, *, others: bool = False) -> Row:
    config, pair = row.config, row.pair
    params = row.params(gamma="auto", ignore_eos=True)
    notes: list[str] = []
    judge = pair.judge(llm)
    contenders = []
    if config.peers:
        row.note("loading it with transformers")
        ways = {"plain": pair.peer("plain")}
        if (draft := _draft_model(config)) is not None:
            assisted = PairRow("assisted", replace(config, draft=draft), row.note).pair
            assisted.__dict__["target"] = pair.target  # the same weights
            ways["assisted"] = assisted.peer("assisted")
        contenders = [
            Contender(f"transformers {way}", partial(peer_lap, peer, pair.prompts, params), pair.judge())
            for way, peer in ways.items()
        ]
    ours = {"sakiyomi plain": EngineView(llm)}
    if llm.draft is not None:
        ours[f"sakiyomi, draft {llm.draft.name}"] = llm  # type: ignore[assignment]
    rounded = "sakiyomi plain" if llm.target.weights.quantization is not None else None
    contenders += [
        Contender(name, partial(our_lap, way, pair.prompts, params), judge, against=rounded)
        for name, way in ours.items()
    ]
    with _llama(row, notes) if others else _nobody() as engine:
        if engine is not None:
            lap = partial(engine.lap, [[prompt] for prompt in pair.prompts], config.max_new_tokens)
            contenders.append(Contender("llama.cpp", lap, optional=True))
        if config.compile:
            row.note("recording passes")
            llm.wait(20.0)
        standings = row.race(contenders, lost=notes, until=time.perf_counter() + LAPS_UNTIL)
    conditions = pair.settings(llm) | {"gamma": "auto", "draft": config.draft, "rounding": rounding(llm)}
    found = row.row(title, standings, **conditions, prompts=len(pair.prompts))
    return replace(found, lines=[_short(line) for line in found.lines], notes=[*found.notes, *notes])


def _parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _draft(spec: str, llm: LLM) -> dict[str, Any]:
    """What was asked for, which drafters that gave, and the size of their models; None: they have none."""
    found = [] if llm.draft is None else [*llm.draft.members] or [llm.draft]
    sizes = [_parameters(drafter.model.module) for drafter in found if drafter.model is not None]
    return {"spec": spec, "drafters": [drafter.name for drafter in found], "parameters": sum(sizes) or None}


def _draft_model(config: BenchConfig) -> str | None:
    """The spec of a draft that transformers can run too; None: it is no model."""
    known = DRAFTS.get(config.target)
    parts = [f"model:{known}"] if config.draft == "auto" and known else split_spec(config.draft)
    return parts[0] if len(parts) == 1 and parts[0].startswith("model:") else None


def _short(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in _SHOWN if name in line}


@contextmanager
def _nobody() -> Iterator[None]:
    yield None


@contextmanager
def _llama(row: PairRow, notes: list[str]) -> Iterator[EngineProcess | None]:
    """llama.cpp with the same weights, where it is installed; a note says why it is not there."""
    config, target = row.config, row.pair.target
    engine = next(engine for engine in ENGINES if engine.key == "llamacpp")
    kind = config.quantize or dtype_name(target.model.dtype)
    task = {
        "kind": kind,
        "gamma": config.gamma,
        "threads": torch.get_num_threads(),
        "context": max(map(len, row.pair.prompts)) + config.max_new_tokens,
        "requests": 1,
        "folder": str(converted_folder()),
        "draft": None,
    }
    opened: EngineProcess | None = None
    try:
        if kind not in engine.kinds or target.model.device.type != "cpu":
            raise UnsupportedError(f"it runs {', '.join(engine.kinds)} on a CPU here")
        row.note("opening llama.cpp")
        opened = EngineProcess(
            engine, environments(config.environments), {**task, "model": str(engine.checkpoint(target, kind))}
        )
    except (LoadError, UnsupportedError, MemoryLimitError) as error:
        notes.append(f"llama.cpp is left out: {error.message}")
    try:
        yield opened
    finally:
        if opened is not None:
            opened.close()


def _page(found: Mapping[str, Any], table: Row) -> str:
    """The page, in Markdown."""
    machine_, model, draft = found["machine"], found["model"], found["draft"]
    size = f", {draft['parameters'] / 1e6:.4g}M parameters" if draft["parameters"] else ""
    facts: dict[str, Any] = {
        "model": f"{model['name']}, {model['class']}, {model['parameters'] / 1e6:.4g}M parameters",
        "draft": f"{draft['spec']}, {' and '.join(draft['drafters']) or 'nothing is drafted'}{size}",
        "processor": f"{machine_['processor']}, {machine_['cores']} cores, {machine_['threads']} threads",
        "instruction sets": ", ".join(machine_["processor_features"]) or "none that matter here",
        "memory": f"reads {machine_['bandwidth_bytes_per_second'] / 1e9:.3g} GB/s",
        "devices": ", ".join(machine_["devices"]),
        "versions": f"sakiyomi {machine_['sakiyomi']}, torch {machine_['torch']}, transformers "
        f"{machine_['transformers']}, Python {machine_['python']}, {machine_['system']}",
    }
    lines = [f"# {model['name']} on {machine_['processor']}", ""]
    lines += [f"- {name}: {text}" for name, text in facts.items()]
    lines += ["", f"{table.title[:1].upper()}{table.title[1:]}:", "", *_table(table.table()), ""]
    lines += [*(f"- {note}" for note in table.notes), f"- {condition_line(table.conditions)}", ""]
    lines.append(
        "`equal`: the text is that of the first line, token for token. `tau`: tokens committed in a pass of the"
    )
    lines.append("target. `acc`: share of the draft's tokens that were accepted.")
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    return [f"| {' | '.join(line)} |" for line in ([name or " " for name in names], ["---"] * len(names), *cells)]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
