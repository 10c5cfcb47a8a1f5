"""``sakiyomi bench long``: the rows that a configuration asks for, one after the other."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.tokens import TokenNames
from sakiyomi.evaluation.bench.config import Note, silent
from sakiyomi.evaluation.bench.long.books import compared, passages, read_books
from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.jobs import apart, work
from sakiyomi.evaluation.bench.long.plot import kept_map
from sakiyomi.evaluation.bench.long.questions import Question, made, source, tasks_of
from sakiyomi.evaluation.bench.long.systems import ONE_SHOT, Loader, System, systems
from sakiyomi.evaluation.bench.long.table import Bench, Perform, growth, reasons, table
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.study import attempted
from sakiyomi.model_executor.loading.model import parse_device, parse_dtype


def run(config: LongConfig, note: Note = silent, *, target: Any = None, pictures: str | None = None) -> Iterator[Row]:
    """Give each row when it is done; one that fails says so, and the others run.

    Args:
        config: what is asked for.
        note: is told what is going on.
        target: a loaded ``(model, tokenizer)`` pair in the place of ``config.target``; only with ``memory`` off, since
            it cannot be given to other processes.
        pictures: folder for maps of what each system kept of one prompt; None: none are drawn.

    Raises:
        SakiyomiError: what is asked for cannot be; before any work.
    """
    parse_dtype(config.dtype)
    place = str(parse_device(config.device))
    if target is not None and config.memory:
        raise InputError("a loaded pair cannot be measured in processes of its own; pass memory=False, or its folder")
    tokenizer = _tokenizer(config.target) if target is None else target[1]
    perform = _performer(config, config.target if target is None else target, place)
    kept = None if pictures is None else partial(_draw_kept, tokenizer, Path(pictures))
    found = systems(config.systems, config.budgets)
    bench = Bench(config, source(config, tokenizer), found, perform, note, kept, tokenizer)
    wanted: dict[str, Callable[[Bench], Row]] = {"long": table}
    if config.books is not None:
        read_books(config)
        wanted["books"] = _books
    if config.turns:
        tasks_of(config)
        wanted["turns"] = _turns

    def rows() -> Iterator[Row]:
        for name, measure in wanted.items():
            yield (row := attempted(name, "failed", partial(measure, bench)))
            if name == "long" and (memory := growth(row)) is not None:
                yield memory

    return rows()


def _draw_kept(
    tokenizer: Any, folder: Path, system: System, length: int, question: Question, kept: list[list[list[int]]]
) -> None:
    """Of longer prompts the map replaces that of shorter ones."""
    tokens = question.asked(system.query_first)["tokens"]
    names = TokenNames(tokenizer)
    words = [names(token)[0] for token in tokens]
    most = [max(map(len, layer)) for layer in kept]
    arrays = [
        np.array([own + [-1] * (width - len(own)) for own in layer]) for layer, width in zip(kept, most, strict=True)
    ]
    name = f"{system.name} {system.budget}"
    title = f"{name}: pairs kept of {len(tokens)} tokens by layer and head, red where the answer stands"
    file = re.sub(r"[^A-Za-z0-9.-]+", "-", f"kept {name}").strip("-")
    spans = question.spans if tokens == question.tokens else ()
    kept_map(arrays, words, folder / f"{file}.png", spans=spans, title=title)


def _performer(config: LongConfig, target: Any, place: str) -> Perform:
    names = ("dtype", "device", "chunk_size")
    options = {"target": target, **{name: getattr(config, name) for name in names}}
    options["compile"] = "auto" if config.compile else False
    common = {"place": place, "limit": config.limit_bytes}
    if config.memory:
        return lambda jobs: apart([{**job, **common} for job in jobs], options)
    loader = Loader(options, shared=True)
    # What this process holds is not one system's alone.
    unknown = {"peak_bytes": None, "grown_bytes": None}
    return lambda jobs: (
        {"job": place, **record, **unknown}
        for place, job in enumerate(jobs)
        for record in work({**job, **common}, loader)
    )


def _tokenizer(target: str) -> Any:
    """The target's tokenizer alone: its weights are for the processes that measure them.

    Raises:
        LoadError: there is none.
    """
    from transformers import AutoTokenizer

    folder = folder_of(target)
    try:
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else target)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise LoadError(
            f"no tokenizer is found for {target!r} ({said:.200}); give an embedded name, a folder or a hub id"
        ) from None


def _books(bench: Bench) -> Row:
    """Perplexity and agreement with full, which is measured first even where it was not asked for."""
    config, full = bench.config, System("full", None)
    bench.note("books: tokens")
    # The rule of one-shot is that of full, and its passes are not ours.
    others = (one for one in bench.systems if not one.query_first and one.cache not in ("full", ONE_SHOT))
    wanted = [full, *others]
    given = {length: passages(config, bench.tokenizer, length) for length in config.numbers("lengths", least=8)}
    batches = [
        {"length": n, "passages": [{"context": p.context, "following": p.following} for p in each]}
        for n, each in given.items()
    ]
    reference: dict[int, Mapping[str, Any]] = {}
    lines, why = [], []
    bench.note(f"books: {len(wanted)} systems")
    # One process for all of them: it is their bytes of keys and values that are shown, not its peak.
    for record in bench.work("books", wanted, batches):
        system, length = wanted[record["job"]], record["length"]
        line: dict[str, Any] = {"name": system.name, "budget": system.budget, "length": length}
        if "error" in record:
            why.append((system.name, length, record["error"]))
            lines.append(line | {"state": "OOM" if record["over"] else "refused"})
            continue
        if system == full:
            reference[length] = record
        figures = compared(given[length], record, reference.get(length))
        lines.append(line | figures | {"kv_bytes": record["kv_bytes"], "state": ""})
    conditions = {"books": Path(str(config.books)).name, "passages": len(next(iter(given.values())))}
    conditions |= {"seeds": ",".join(config.seeds), "follow": config.follow}
    title = "perplexity of what follows a long context, and share of tokens that full expects too"
    return Row("books", title, lines, conditions, reasons(why))


def _turns(bench: Bench) -> Row:
    """One conversation a seed, each system the same ones."""
    config, tokenizer = bench.config, bench.tokenizer
    tasks, whole = tasks_of(config), config.turns * config.turn_tokens
    names = list(islice(cycle(config.tasks), config.turns))
    given = [
        [
            made(name, tasks[name], seed, config.turn_tokens, place, config, tokenizer)
            for place, name in enumerate(names)
        ]
        for seed in config.numbers("seeds", least=0)
    ]
    batches = [
        {
            "length": whole,
            "turns": [
                q.asked(later=bool(place) and q.tokens[0] == tokenizer.bos_token_id) for place, q in enumerate(own)
            ],
        }
        for own in given
    ]
    # The questions of later turns are not known, and one-shot keeps nothing between two prompts.
    wanted = [system for system in bench.systems if not system.query_first and system.cache != ONE_SHOT]
    bench.note(f"turns: {len(wanted)} systems")
    records = list(bench.work("turns", wanted, batches))
    lines, notes = [], []
    for place, system in enumerate(wanted):
        own = [record for record in records if record["job"] == place]
        notes += reasons((system.name, None, record["error"]) for record in own if "error" in record)
        lines.append(_of_turns(system, given, own, whole))
        notes += _by_turn(system, lines[-1])
    conditions = {"turns": config.turns, "turn_tokens": config.turn_tokens, "seeds": ",".join(config.seeds)}
    title = "one conversation that grows: right answers in percent, and bytes after the first and the last turn"
    return Row("turns", title, lines, conditions, notes)


def _of_turns(
    system: System, given: Sequence[Sequence[Question]], records: Sequence[Mapping[str, Any]], whole: int
) -> dict[str, Any]:
    line: dict[str, Any] = {"name": system.name, "budget": system.budget, "pairs": system.pairs(whole)}
    done = [(questions, record) for questions, record in zip(given, records, strict=False) if record.get("texts")]
    if not done:
        return line | {"state": "refused"}
    shares = [
        statistics.fmean(q.score(text) for q, text in zip(questions, record["texts"], strict=False))
        for questions, record in done
    ]
    series = done[0][1]
    return line | {
        "turns": min(len(record["texts"]) for _, record in done),
        "tokens_held": series["tokens"][-1],
        "accuracy": statistics.fmean(shares),
        "accuracy_spread": statistics.stdev(shares) if len(shares) > 1 else None,
        "kv_from_bytes": series["kv"][0],
        "kv_to_bytes": series["kv"][-1],
        "resident_growth_bytes": series["resident"][-1] - series["resident"][0],
        "series": {key: series[key] for key in ("tokens", "kv", "resident")},
        "state": "ended early" if any("error" in record for _, record in done) else "",
    }


def _by_turn(system: System, line: Mapping[str, Any]) -> list[str]:
    """Bytes after turns 1, 2, 4 and so on, and after the last; all of them are in the JSON."""
    if "series" not in line:
        return []
    held = line["series"]["kv"]
    turns = sorted({min(2**i, len(held)) for i in range(len(held).bit_length() + 1)})
    name = " ".join(filter(None, (system.name, system.budget)))
    return [f"{name}, KV MB after turn: " + ", ".join(f"{turn}: {held[turn - 1] / 1e6:.3g}" for turn in turns)]
