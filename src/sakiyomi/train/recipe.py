"""What all training runs share: threads, checks, the seed, the loop, the card. A recipe states what is its own."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from sakiyomi.core.errors import InputError
from sakiyomi.core.peers import launched
from sakiyomi.train.config import RunConfig, TextRunConfig
from sakiyomi.train.data import TextSpec, parse_texts
from sakiyomi.train.evaluate import parse_valid
from sakiyomi.train.export import Result, write_card
from sakiyomi.train.loop import Loop
from sakiyomi.train.preflight import check_run
from sakiyomi.train.report import Reporter
from sakiyomi.train.workers import ALONE, Workers, started

__all__ = ["Recipe", "TextRecipe", "train"]

Settings = TypeVar("Settings", bound=RunConfig)
TextSettings = TypeVar("TextSettings", bound=TextRunConfig)


class Recipe(ABC, Generic[Settings]):
    """One kind of training run; `train` calls its methods in their order here.

    Args:
        config: settings of the run.

    Attributes:
        reporter: takes lines about what goes on besides the loop.
        workers: the processes of the run. All but the first read what that has made, and do not measure.
    """

    workers: Workers = ALONE

    def __init__(self, config: Settings) -> None:
        self.config = config
        self.reporter = Reporter(config.loop.log_seconds)

    @abstractmethod
    def check(self) -> None:
        """Refuse what can be found wrong before anything is loaded.

        Raises:
            InputError, LoadError: settings, files or the output folder.
        """

    @abstractmethod
    def read(self) -> None:
        """Load models and data; the first process does so before the others."""

    @abstractmethod
    def loop(self) -> Loop:
        """Make what is trained, with random weights from the seed that has just been set, and the loop around it."""

    def hooks(self) -> AbstractContextManager[object]:
        """What is open while the loop runs: files, hooks on the target."""
        return nullcontext()

    def tokens(self, loop: Loop) -> int:
        """Tokens that were learnt from."""
        return loop.progress.tokens

    @abstractmethod
    def finish(self, loop: Loop) -> Result:
        """Measure and write what was trained, when the budget is spent."""


class TextRecipe(Recipe[TextSettings]):
    """A recipe that reads text files.

    Attributes:
        specs: training files with their shares.
        valid: held-out files by name.
    """

    def check(self) -> None:
        """See `Recipe`."""
        config = self.config
        self.specs, self.valid = parse_texts("--text", config.text.text), parse_valid(config.loop.valid)
        check_run(config, [spec.path for spec in (*self.specs, *self.prompts())] + list(self.valid.values()))

    def prompts(self) -> Iterable[TextSpec]:
        """Further files of text."""
        return ()


def train(recipe: Recipe[Any], command: str = "") -> dict[str, Any]:
    """Run a recipe to the end of its budget.

    Args:
        recipe: with its settings.
        command: the command line, for the card.

    Returns:
        The summary that `--json` prints; `finished` is False after SIGINT. A worker that torchrun has started, and that
        is not the first, says its number alone.

    Raises:
        InputError, LoadError, UnsupportedError: before any work is done, where that is possible.
    """
    config: RunConfig = recipe.config
    given = launched()
    _check_rows(config, given.count if given else config.loop.workers)
    recipe.check()
    with started(config.loop.workers, given, _work, type(recipe), config) as workers:
        loop, finished = _run(recipe, workers)
    if not workers.leads:
        return {"finished": finished, "worker": workers.number}
    progress = dataclasses.replace(loop.progress, tokens=recipe.tokens(loop))
    if not finished:
        return {"finished": False, "out": config.loop.out, "step": progress.step, "tokens": progress.tokens}
    return write_card(config, recipe.finish(loop), progress, command)


def _run(recipe: Recipe[Any], workers: Workers) -> tuple[Loop, bool]:
    """Read and learn; the loop, and whether it has come to its end."""
    loop_config = recipe.config.loop
    threads = torch.get_num_threads()
    torch.set_num_threads(loop_config.threads or max(1, threads // workers.peers.local))
    recipe.workers = workers
    if workers.leads:
        recipe.read()
        workers.connect()
    else:
        recipe.reporter = Reporter(loop_config.log_seconds, silent=True)
        workers.connect()
        recipe.read()
    torch.manual_seed(loop_config.seed)
    loop = recipe.loop()
    with recipe.hooks():
        finished = loop.run(workers)
    if not loop_config.threads:
        torch.set_num_threads(threads)
    return loop, finished


def _work(workers: Workers, kind: type[Recipe[Any]], config: RunConfig) -> None:
    """What a process does that the first one has started."""
    recipe = kind(config)
    recipe.check()
    _run(recipe, workers)


def _check_rows(config: RunConfig, workers: int) -> None:
    """Raise InputError unless the processes can share the rows of every step evenly."""
    tokens = config.loop.step_tokens
    for length in config.loop.row_tokens:
        if tokens // length % workers:
            raise InputError(
                f"a step has {tokens // length} rows of {length} tokens, which {workers} workers cannot share evenly; "
                f"set --step-tokens to a multiple of {workers * length}, or other --workers"
            )
