"""Prompts as token ids, each with the rule that judges its answer: from made tasks, or from a file.

All systems get the same prompts. Knows a tokenizer and no model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.readers import READERS, Item
from sakiyomi.train.long_tasks import Example, Task, hits, named, read_filler


@dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
        task: its name.
        seed: drew it.
        tokens: the prompt.
        answer_tokens: most new tokens.
        score: judges an answer, 0 to 1; it can be sent to other processes.
        ahead: the prompt with the question in front of the text too (query-first); None: not known.
        spans: (begin, end) in tokens: places of the answer in the prompt, if known.
    """

    task: str
    seed: int
    tokens: tuple[int, ...]
    answer_tokens: int
    score: Callable[[str], float]
    ahead: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] = ()

    def prompt(self, query_first: bool) -> tuple[int, ...]:
        """Token ids for a system.

        Args:
            query_first: the question stands in front of the text too.

        Raises:
            InputError: the question is not known apart from the text.
        """
        if query_first and self.ahead is None:
            raise InputError("questions of a file are not known apart from their text; query-first is for made tasks")
        return self.ahead if query_first and self.ahead is not None else self.tokens


Source = Callable[[int], list[Question]]
"""Prompts of at most so many tokens, the same ones at every call."""


def source(config: LongConfig, tokenizer: Any) -> Source:
    """Prompts of made tasks, or of a file.

    Made tasks: ``count`` prompts of each task for each seed, with the answer anywhere in the text. A file: each seed
    draws ``count`` questions, and long prompts are cut in the middle.

    Raises:
        InputError: a task is not known.
        LoadError, InputError: the file cannot be read, or is of another form.
    """
    seeds = config.numbers("seeds")
    if config.questions is None or config.format is None:
        tasks = tasks_of(config)
        return lambda length: [
            made(name, task, seed, length, place, config, tokenizer)
            for seed in seeds
            for name, task in tasks.items()
            for place in range(config.count)
        ]
    templates = None if config.templates is None else Path(config.templates).expanduser()
    items = list(READERS[config.format](Path(config.questions).expanduser(), templates))
    drawn = [
        (seed, place)
        for seed in seeds
        for place in sorted(np.random.default_rng(seed).permutation(len(items))[: config.count].tolist())
    ]
    ids = {place: tokenizer(items[place].prompt, verbose=False)["input_ids"] for _, place in drawn}

    def question(seed: int, item: Item, tokens: Sequence[int]) -> Question:
        return Question(item.task, seed, tuple(tokens), config.max_new_tokens or item.answer_tokens, item.score)

    return lambda length: [question(seed, items[place], middle_cut(ids[place], length)) for seed, place in drawn]


def made(name: str, task: Task, seed: int, length: int, place: int, config: LongConfig, tokenizer: Any) -> Question:
    """One prompt of a made task: number ``place`` of its length and seed."""
    # Keyed by all that it depends on: the same prompt, whichever other tasks, lengths and counts are asked for.
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), length, place])
    example = task.make(rng, length, tokenizer)
    # verbose=False: longer than the tokenizer's own limit is what is wanted here, no reason for a warning
    tokens, ahead = (tuple(tokenizer(example.prompt(first), verbose=False)["input_ids"]) for first in (False, True))
    new = config.max_new_tokens or task.answer_tokens
    score = partial(hits, answers=example.answers)  # a task itself cannot be sent to another process
    return Question(name, seed, tokens, new, score, ahead, tuple(_in_tokens(example, tokenizer)))


def _in_tokens(example: Example, tokenizer: Any) -> Iterator[tuple[int, int]]:
    """The spans of an example in tokens; none if the tokenizer does not map characters to tokens."""
    if not tokenizer.is_fast:
        return
    # The context is the beginning of the prompt: what follows changes no place within it.
    encoded = tokenizer(example.prompt(False), verbose=False)
    for begin, end in example.spans:
        first, last = encoded.char_to_token(begin), encoded.char_to_token(end - 1)
        if first is not None and last is not None:
            yield first, last + 1


def middle_cut(tokens: Sequence[int], length: int) -> list[int]:
    """The beginning and the end of a prompt that is too long, half of the length each (as LongBench cuts)."""
    if len(tokens) <= length:
        return list(tokens)
    head = length - length // 2
    return [*tokens[:head], *tokens[len(tokens) - length // 2 :]]


def tasks_of(config: LongConfig) -> dict[str, Task]:
    """The configured made tasks, with the text that they hide facts in.

    Raises:
        InputError: one is not known, or hides nothing.
        LoadError: the filler cannot be read.
    """
    filler = None if config.filler is None else read_filler([Path(config.filler).expanduser()])
    return {name: named(name, filler) for name in config.tasks}
