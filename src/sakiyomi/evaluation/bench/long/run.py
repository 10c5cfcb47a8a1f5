"""``sakiyomi bench long``: the rows that a configuration asks for, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.tokens import TokenNames
from sakiyomi.evaluation.bench.config import Note, silent
from sakiyomi.evaluation.bench.long.books import books, read_books
from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.jobs import Bench, Job, Line, apart, lines
from sakiyomi.evaluation.bench.long.plot import kept_map
from sakiyomi.evaluation.bench.long.questions import Question, source, tasks_of
from sakiyomi.evaluation.bench.long.systems import Loader, System, systems
from sakiyomi.evaluation.bench.long.table import growth, table
from sakiyomi.evaluation.bench.long.turns import turns
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.study import attempted
from sakiyomi.model_executor.loading.model import load_model, parse_device, parse_dtype

SHARED = {"peak_bytes", "grown_bytes"}
"""Figures that are not one system's alone where all of them are in one process."""


def run(config: LongConfig, note: Note = silent, *, target: Any = None, pictures: str | None = None) -> Iterator[Row]:
    """Give each row when it is done; one that fails says so, and the others run.

    Args:
        config: what is asked for.
        note: receives progress messages.
        target: a loaded ``(model, tokenizer)`` pair in the place of ``config.target``; only with ``memory`` off, since
            it cannot be given to other processes.
        pictures: folder for maps of what each system kept of one prompt; None: none are drawn.

    Raises:
        SakiyomiError: what is asked for cannot be; before any work.
    """
    parse_dtype(config.dtype)
    device = str(parse_device(config.device))
    if target is not None and config.memory:
        raise InputError("a loaded pair cannot be measured in processes of its own; pass memory=False, or its folder")
    tokenizer = _tokenizer(config.target) if target is None else target[1]
    kept = None if pictures is None else partial(_draw_kept, tokenizer, Path(pictures))
    prompts, found = source(config, tokenizer), systems(config.systems, config.budgets)
    wanted: dict[str, Callable[[Bench], Row]] = {"long": table}
    if config.books is not None:
        read_books(config)
        wanted["books"] = books
    if config.turns:
        tasks_of(config)
        wanted["turns"] = turns
    perform = _performer(config, config.target if target is None else target)
    bench = Bench(config, prompts, found, perform, note, device, tokenizer, kept)

    def rows() -> Iterator[Row]:
        for name, measure in wanted.items():
            yield (row := attempted(name, "failed", partial(measure, bench)))
            if name == "long" and (memory := growth(row)) is not None:
                yield memory

    return rows()


def _performer(config: LongConfig, target: Any) -> Callable[[Job], Iterable[Line]]:
    options = {"target": target, "dtype": config.dtype, "device": config.device}
    more = {"chunk_size": config.chunk_size, "compile": "auto" if config.compile else False}
    if config.memory:
        return partial(apart, options=options | more)
    loaded = load_model(**options)
    loader = Loader(options | more | {"target": (loaded.model, loaded.tokenizer)})
    return lambda job: (line | dict.fromkeys(SHARED & line.keys()) for line in lines(job, loader))


def _draw_kept(tokenizer: Any, folder: Path, system: System, question: Question, kept: list[list[list[int]]]) -> None:
    """Draw what a system kept of a prompt; the map of a longer prompt replaces that of a shorter one."""
    tokens = question.prompt(system.query_first)
    names = TokenNames(tokenizer)
    name = f"{system.name} {system.budget}"
    file = re.sub(r"[^A-Za-z0-9.-]+", "-", f"kept {name}").strip("-")
    spans = question.spans if tokens == question.tokens else ()
    title = f"{name}: pairs kept of {len(tokens)} tokens by layer and head, red where the answer stands"
    kept_map(kept, [names(token)[0] for token in tokens], folder / f"{file}.png", spans, title)


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
