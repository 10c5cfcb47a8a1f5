"""What all training runs share: checks, processes, seed, loop, card. A recipe is a module and a loss."""

from __future__ import annotations

import dataclasses
import tempfile
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from sakiyomi.core.errors import InputError
from sakiyomi.core.peers import launched
from sakiyomi.train.checkpoint import checkpoints, load_checkpoint, writing
from sakiyomi.train.config import RunConfig, TextOptions
from sakiyomi.train.data import TextSpec, parse_texts, parse_valid, read_records
from sakiyomi.train.export import Result, write_card
from sakiyomi.train.loop import Learner, Loop, Watch
from sakiyomi.train.optim import text_optimizers
from sakiyomi.train.progress import Reporter
from sakiyomi.train.workers import ALONE, Workers, started

Settings = TypeVar("Settings", bound=RunConfig)


class Recipe(Learner, Generic[Settings]):
    """One kind of training run; `train` calls its methods in their order here.

    Args:
        config: settings of the run.

    Attributes:
        specs: training files with their shares.
        valid: held-out files by name.
        reporter: prints notes about what happens outside the loop.
        loop: trains the module; set after `make`. Only the first process makes files, the others read them.
    """

    config: Settings
    loop: Loop

    def __init__(self, config: Settings) -> None:
        self.config = config
        self.reporter = Reporter(config.loop.log_seconds)

    @abstractmethod
    def files(self) -> list[TextSpec]:
        """Training files with their shares."""

    def prompts(self) -> Iterable[TextSpec]:
        """Further files that are read."""
        return ()

    def check(self) -> None:
        """Refuse what can be found wrong before anything is loaded.

        Raises:
            InputError, LoadError: settings, files or the output folder.
        """
        self.specs, self.valid = self.files(), parse_valid(self.config.loop.valid)
        check_run(self.config, [*(spec.path for spec in (*self.specs, *self.prompts())), *self.valid.values()])

    @abstractmethod
    def read(self) -> None:
        """Load models and data; the first process does so before the others."""

    @abstractmethod
    def make(self) -> nn.Module:
        """The module that learns, with random weights from the seed that has just been set."""

    def hooks(self) -> AbstractContextManager[object]:
        """A context that is open while the loop runs: files, hooks on the target."""
        return nullcontext()

    def tokens(self) -> int:
        """Tokens that were learnt from."""
        return self.loop.progress.tokens

    @abstractmethod
    def finish(self) -> Result:
        """Measure and write what was trained, when the budget is spent."""


class TextRecipe(Recipe[Settings]):
    """A recipe that reads texts and chats, with Muon and AdamW; one group of its settings is `TextOptions`."""

    def files(self) -> list[TextSpec]:
        """See `Recipe`."""
        options = self.config.group(TextOptions)
        self.passes = options.passes
        return parse_texts("--text", options.text)

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """See `Recipe`."""
        return text_optimizers(self.config.group(TextOptions), model)


def train(recipe: Recipe[Any], command: str = "", watch: Watch | None = None) -> dict[str, Any]:
    """Run a recipe to the end of its budget.

    Args:
        recipe: with its settings.
        command: the command line, for the card.
        watch: see `Learner`.

    Returns:
        The summary that `--json` prints; `finished` is False after SIGINT. A worker that torchrun has started, and that
        is not the first, gives its number alone.

    Raises:
        InputError, LoadError, UnsupportedError: before any work is done, where that is possible.
    """
    config: RunConfig = recipe.config
    recipe.watch = watch
    given = launched()
    _check_rows(config, given.count if given else config.loop.workers)
    recipe.check()
    with started(config.loop.workers, given, _work, type(recipe), config) as workers:
        finished = _run(recipe, workers)
    if not workers.leads:
        return {"finished": finished, "worker": workers.number}
    progress = dataclasses.replace(recipe.loop.progress, tokens=recipe.tokens())
    if not finished:
        return {"finished": False, "out": config.loop.out, "step": progress.step, "tokens": progress.tokens}
    return write_card(config, recipe.finish(), progress, command)


def _run(recipe: Recipe[Any], workers: Workers) -> bool:
    """Read and learn; whether the loop has come to its end."""
    options = recipe.config.loop
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads or max(1, threads // workers.peers.local))
    recipe.workers = workers
    if workers.leads:
        recipe.read()
        workers.connect()
    else:
        recipe.reporter = Reporter(options.log_seconds, silent=True)
        workers.connect()
        recipe.read()
    torch.manual_seed(options.seed)
    recipe.loop = Loop(recipe, recipe.make())
    with recipe.hooks():
        finished = recipe.loop.run()
    recipe.workers = ALONE  # the others have ended their work
    if not options.threads:
        torch.set_num_threads(threads)
    return finished


def _work(workers: Workers, kind: type[Recipe[Any]], config: RunConfig) -> None:
    """The work of a process that the first one has started."""
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


# ---------------------------------------------------------------- before a run


def check_run(config: RunConfig, files: Iterable[Path]) -> None:
    """Refuse a run that could not be done, or that would spoil an earlier one.

    Args:
        config: its settings; the folder OUT is made.
        files: all text that it will read. The first record of each is read, the rest when it is needed.

    Raises:
        InputError: OUT is a file, holds checkpoints of an earlier run, or those of other settings with `resume`.
        LoadError: a file cannot be read, OUT cannot be written, or there is nothing to resume.
    """
    for path in dict.fromkeys(files):
        with closing(read_records(path)) as records:
            next(records)
    out = Path(config.loop.out)
    if out.exists() and not out.is_dir():
        raise InputError(f"out is {config.loop.out!r}, which is a file; give a folder with --out")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    if config.loop.resume:
        _check_same(config)
    elif held := checkpoints(out / "checkpoints"):
        raise InputError(
            f"{out / 'checkpoints'} holds checkpoints of an earlier run at step {int(held[-1].stem.split('-')[1])}; "
            "continue with --resume, or choose another --out or delete the folder"
        )


def _check_same(config: RunConfig) -> None:
    """Compare the settings with those of the newest checkpoint: a run continues with the settings it began with."""
    state = load_checkpoint(Path(config.loop.out) / "checkpoints", peek=True)
    given, before = config.flat(), state.get("settings", {})
    if given.keys() != before.keys():
        raise InputError(
            f"the checkpoints in {config.loop.out} are those of another command or version; choose another --out"
        )
    free = {flag.name for flag in config.flags() if flag.metadata["resume"]}
    for name, value in given.items():
        if name not in free and value != before[name]:
            raise InputError(
                f"{name} is {value!r}, and the run in {config.loop.out} was begun with {before[name]!r}; resume it "
                "with the same settings, or begin another one with another --out"
            )
