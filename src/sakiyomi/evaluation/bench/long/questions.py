"""Prompts as token ids, each with a rule that judges its answer: of made tasks, or of a file.

Made once for all systems. Knows a tokenizer and no model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.files import Item
from sakiyomi.evaluation.bench.long.infinitebench import read_infinitebench
from sakiyomi.evaluation.bench.long.leval import read_leval
from sakiyomi.evaluation.bench.long.longbench import read_longbench
from sakiyomi.train.long_tasks import Example, Task, named, read_filler

__all__ = ["FromFile", "FromTasks", "Question", "Source", "made", "middle_cut", "source", "tasks_of"]

READERS: dict[str, Callable[[Path, Path | None], Iterator[Item]]] = {
    "leval": read_leval,
    "longbench": read_longbench,
    "infinitebench": read_infinitebench,
}


@dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
        task: that it belongs to.
        seed: that drew it.
        tokens: the prompt.
        answer_tokens: most new tokens.
        score: of an answer, 0 to 1.
        ahead: the prompt with the question in front of the text too, for systems that decide with it; None: not known.
        spans: (begin, end) in tokens: where in the prompt the answer stands, as far as that is known.
    """

    task: str
    seed: int
    tokens: tuple[int, ...]
    answer_tokens: int
    score: Callable[[str], float]
    ahead: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] = ()


class Source(Protocol):
    """Where prompts of any length come from."""

    def questions(self, length: int) -> list[Question]:
        """Prompts of at most so many tokens, the same ones at every call."""
        ...


class FromTasks:
    """Made tasks: ``count`` prompts of each, for each seed; what the answer needs stands anywhere.

    Args:
        config: names tasks, seeds and count.
        tokenizer: of the target.

    Raises:
        InputError: a task is not known.
    """

    def __init__(self, config: LongConfig, tokenizer: Any) -> None:
        self._tasks = tasks_of(config)
        self._config, self._tokenizer = config, tokenizer

    def questions(self, length: int) -> list[Question]:
        """See ``Source``."""
        return [
            made(name, task, seed, length, place, self._config, self._tokenizer)
            for seed in self._config.numbers("seeds", least=0)
            for name, task in self._tasks.items()
            for place in range(self._config.count)
        ]


def made(name: str, task: Task, seed: int, length: int, place: int, config: LongConfig, tokenizer: Any) -> Question:
    """One prompt of a made task: number ``place`` of its length and seed."""
    # Keyed by all that it depends on: the same prompt, whichever other tasks, lengths and counts are asked for.
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), length, place])
    example = task.make(rng, length, tokenizer)
    # verbose=False: longer than the tokenizer's own limit is what is wanted here, no reason for a warning
    tokens, ahead = (tuple(tokenizer(example.prompt(first), verbose=False)["input_ids"]) for first in (False, True))
    new = config.max_new_tokens or task.answer_tokens
    score = partial(_of_example, task, example)
    return Question(name, seed, tokens, new, score, ahead, tuple(_in_tokens(example, tokenizer)))


def _in_tokens(example: Example, tokenizer: Any) -> Iterator[tuple[int, int]]:
    """The spans of an example in tokens, which it has in characters; none where the tokenizer does not know places."""
    if not tokenizer.is_fast:
        return
    # The context is the beginning of the prompt: what follows changes no place within it.
    encoded = tokenizer(example.prompt(False), verbose=False)
    for begin, end in example.spans:
        first, last = encoded.char_to_token(begin), encoded.char_to_token(end - 1)
        if first is not None and last is not None:
            yield first, last + 1


def _of_example(task: Task, example: Example, text: str) -> float:
    return task.score(text, example)


class FromFile:
    """Questions of a file; each seed draws ``count`` of them, and long prompts lose their middle.

    Args:
        config: names file, format, seeds and count.
        tokenizer: of the target.

    Raises:
        LoadError, InputError: the file cannot be read, or is of another form.
    """

    def __init__(self, config: LongConfig, tokenizer: Any) -> None:
        assert config.questions is not None and config.format is not None
        templates = None if config.templates is None else Path(config.templates).expanduser()
        self._items = list(READERS[config.format](Path(config.questions).expanduser(), templates))
        self._config, self._tokenizer = config, tokenizer
        self._tokens: dict[int, list[int]] = {}

    def questions(self, length: int) -> list[Question]:
        """See ``Source``."""
        found = []
        for seed in self._config.numbers("seeds", least=0):
            rng = np.random.default_rng(seed)
            drawn = rng.permutation(len(self._items))[: self._config.count]
            for place in sorted(int(each) for each in drawn):
                item = self._items[place]
                tokens = tuple(middle_cut(self._ids(place), length))
                found.append(
                    Question(item.task, seed, tokens, self._config.max_new_tokens or item.answer_tokens, item.score)
                )
        return found

    def _ids(self, place: int) -> list[int]:
        if place not in self._tokens:
            self._tokens[place] = list(self._tokenizer(self._items[place].prompt, verbose=False)["input_ids"])
        return self._tokens[place]


def middle_cut(tokens: Sequence[int], length: int) -> list[int]:
    """The beginning and the end of a prompt that is too long, half of the length each (as LongBench cuts)."""
    if len(tokens) <= length:
        return list(tokens)
    head = length - length // 2
    return [*tokens[:head], *tokens[len(tokens) - length // 2 :]]


def source(config: LongConfig, tokenizer: Any) -> Source:
    """What the configuration asks for."""
    return FromTasks(config, tokenizer) if config.questions is None else FromFile(config, tokenizer)


def tasks_of(config: LongConfig) -> dict[str, Task]:
    """The made tasks that are asked for, with the text that they hide things in.

    Raises:
        InputError: one is not known, or hides nothing.
        LoadError: the filler cannot be read.
    """
    filler = None if config.filler is None else read_filler([Path(config.filler).expanduser()])
    return {name: named(name, filler) for name in config.tasks}
