"""One target on this machine, in a minute: plain, drafted, transformers, llama.cpp; as a row, or as two files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment

from sakiyomi.core.draft_specs import split_spec
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.embedded import DRAFTS
from sakiyomi.core.files import whole_file
from sakiyomi.core.memory import peak_bytes
from sakiyomi.engine import machine
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, CardConfig, Note
from sakiyomi.evaluation.bench.contest import Load, opened
from sakiyomi.evaluation.bench.engines.registry import ENGINES, OtherEngine
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, Run, declared, run_ours, run_peer
from sakiyomi.evaluation.bench.models import WAYS
from sakiyomi.evaluation.bench.report import Row, condition_line

FORMAT = 1
TITLE = "greedy, one prompt at a time, tokens/s"
RUNS_UNTIL = 40.0
"""Seconds after which no further run begins."""
_SHOWN = ("name", "tokens_per_second", "low", "high", "ratio", "tau", "acceptance_rate", "kv_bytes", "equal")


@declared(f"the one-minute table: {TITLE}; --rows all for everything")
def minute(row: PairRow) -> Races:
    """Greedy, one prompt at a time: transformers, and ours plain and with any kind of draft."""
    row.note(f"loading {row.config.target}")
    return (yield from _measured(row, row.pair.llm(row.config.draft)))


def card(config: CardConfig, note: Note) -> dict[str, Any]:
    """Measure a target, and write one page and one JSON file about it.

    Returns:
        What the JSON file holds, with the names of both files.

    Raises:
        LoadError: they cannot be written.
    """
    began = time.perf_counter()
    row = PairRow("card", BenchConfig(**{name: value for name, value in vars(config).items() if name != "out"}), note)
    note(f"loading {config.target}")
    llm = row.pair.llm(config.draft)
    engines = [engine for engine in ENGINES if engine.key == "llamacpp"]
    table = declared(TITLE)(partial(_measured, llm=llm, engines=engines))(row)
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


def _measured(row: PairRow, llm: LLM, engines: Sequence[OtherEngine] = ()) -> Races:
    config, pair = row.config, row.pair
    params = row.params(gamma="auto", ignore_eos=True)
    theirs: dict[str, Run] = {}
    if config.peers:
        row.note("loading it with transformers")
        ways = WAYS[:2] if has_draft_model(config) else WAYS[:1]
        theirs = {f"transformers {way}": partial(run_peer, pair.peer(way), pair.prompts, params) for way in ways}
    ours = {"sakiyomi plain": partial(run_ours, EngineView(llm), pair.prompts, params)}
    if llm.draft is not None:
        ours[f"sakiyomi, draft {llm.draft.name}"] = partial(run_ours, llm, pair.prompts, params)
    contenders = row.contenders(llm, ours, theirs)
    load = Load("", pair.prompts, config.max_new_tokens)
    with ExitStack() as stack:
        kind = config.quantize or dtype_name(llm.target.dtype)
        contenders += load.raced(opened(row, kind, [load], stack, engines, ["plain"]))
        if config.compile:
            row.note("recording passes")
            llm.wait(20.0)
        yield Race(contenders, until=time.perf_counter() + RUNS_UNTIL)
    row.lines = [{name: line[name] for name in _SHOWN if name in line} for line in row.lines]
    return row.conditions(llm, alone=True, gamma="auto", draft=config.draft)


def has_draft_model(config: BenchConfig) -> bool:
    """Whether the draft is a single model, which transformers can run too."""
    if config.draft == "auto":
        return config.target in DRAFTS
    return config.draft.startswith("model:") and len(split_spec(config.draft)) == 1


def _parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _draft(spec: str, llm: LLM) -> dict[str, Any]:
    """The spec, the names of its drafters, and the parameters of their models (None: they have no models)."""
    found = [] if llm.draft is None else [*llm.draft.members] or [llm.draft]
    sizes = [_parameters(drafter.model.module) for drafter in found if drafter.model is not None]
    return {"spec": spec, "drafters": [drafter.name for drafter in found], "parameters": sum(sizes) or None}


def _page(found: Mapping[str, Any], table: Row) -> str:
    """The page, in Markdown."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"cell": _cell, "millions": lambda count: f"{count / 1e6:.4g}M parameters"}
    template = environment.from_string(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
    return template.render(**found, table=table.table(), notes=[*table.notes, condition_line(table.conditions)])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
