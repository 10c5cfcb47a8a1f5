"""What recipes share that train something beside a frozen target, on prompts with answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from sakiyomi.cache.policies.retaining.formats import fingerprint
from sakiyomi.core.errors import InputError
from sakiyomi.core.trained import Origin
from sakiyomi.train.answered import Answered, Questions, TaskRows, read_answered
from sakiyomi.train.config import AnsweredConfig
from sakiyomi.train.counted import hold_back
from sakiyomi.train.data import TextSpec, check_shares, parse_text
from sakiyomi.train.export import Result
from sakiyomi.train.hidden import vocabulary
from sakiyomi.train.long_tasks import read_filler
from sakiyomi.train.loop import on_device, place
from sakiyomi.train.optim import with_peaks
from sakiyomi.train.recipe import Recipe
from sakiyomi.train.taught import load_target

HELD_OUT = 1_000_003  # in the seeds of held-out tasks, so that no step of a run has them
Rows = Sequence[tuple[Tensor, int]]
"""A batch of `Questions` on the device: token ids of each row, and how many of them are the prompt's."""
Settings = TypeVar("Settings", bound=AnsweredConfig)
Module = TypeVar("Module", bound=nn.Module)


class BesideTarget(Recipe[Settings]):
    """A recipe whose target is frozen.

    Attributes:
        target, tokenizer: of the run.
        tasks: tasks with their shares.
        questions: prompts with answers to learn from.
        held_out: rows of such prompts on the device, by file or task.
        held_back: prompts of the training files that became held-out ones.
    """

    marked = False
    """Whether prompts are read with marks, see `TaskRows`."""
    rows_loss: Callable[[Rows], Tensor]
    """Loss of a batch as `Questions` gives it."""

    def files(self) -> list[TextSpec]:
        """See `Recipe`."""
        files = [parse_text(spec) for spec in self.config.data]
        # NAME,NAME@SHARE,NAME@STABLE:DECAY: the path of each is its name.
        self.tasks = [parse_text(part.strip()) for part in self.config.tasks.split(",") if part.strip()]
        check_shares("--data and --tasks", [*files, *self.tasks])
        return files

    def check(self) -> None:
        """See `Recipe`."""
        super().check()
        self.device, self.passes = place(self.config.machine)

    def check_target(self) -> None:
        """Refuse a target that is not fit for it, before the data is read."""

    def read(self) -> None:
        """See `Recipe`; of all that is read or made, some rows are held out.

        Raises:
            InputError, LoadError: a file cannot be read or has too few prompts, or the rows are too short for a task.
        """
        config, longest = self.config, max(self.config.loop.row_tokens)
        self.warmup_share = config.warmup_share
        self.target, self.tokenizer = load_target(config.target, self.passes, self.device)
        self.check_target()
        positions = int(getattr(self.target.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
        if positions < longest:
            self.reporter.note(f"the target has {positions} positions: prompts with their answers are at most so long")
        length = min(positions, longest)
        filler = read_filler([Path(config.filler).expanduser()]) if config.filler else None
        makers = [
            TaskRows(str(spec.path), self.tokenizer, config.query_aware, marked=self.marked, filler=filler)
            for spec in self.tasks
        ]
        given = {spec.path: self._prompts(spec.path, length) for spec in self.specs}
        if self.valid:
            held = {name: self._prompts(path, length)[: config.eval_rows] for name, path in self.valid.items()}
        else:
            held = {path.name: self._hold_back(path, rows) for path, rows in given.items()}
        self.held_back = 0 if self.valid else sum(map(len, held.values()))
        self.mixture = self.questions = Questions(
            [given[spec.path] for spec in self.specs],
            makers,
            [*self.specs, *self.tasks],
            answer_tokens=config.answer_tokens,
            most=positions,
            first=self.tokenizer.bos_token_id,
            seed=config.loop.seed,
        )
        for key, (spec, maker) in enumerate(zip(self.tasks, makers, strict=True)):
            rngs = (np.random.default_rng((config.loop.seed, HELD_OUT, key, i)) for i in range(config.eval_rows))
            held[str(spec.path)] = [maker.make(rng, length) for rng in rngs]  # fails now where a row is too short
        self.held_out = {
            name: on_device([self.questions.row(one, longest) for one in some], self.device)
            for name, some in held.items()
        }

    def _prompts(self, path: Path, length: int) -> list[Answered]:
        """Prompts of a file, as many as a run of so many steps can use; by the clock, of a thousand steps a minute."""
        config, loop = self.config, self.config.loop
        steps = loop.tokens // loop.step_tokens if loop.tokens else 1000 * loop.minutes
        rows = int(steps * (loop.step_tokens // min(loop.row_tokens)))
        found, passed = read_answered(
            path,
            self.tokenizer,
            vocabulary(self.target),
            query_tokens=config.query_tokens if config.query_aware else 0,
            length=length,
            most=max(10 * config.eval_rows, config.eval_rows + rows),  # of ten one may be held back
            seed=loop.seed,
        )
        for reason, count in passed.items():
            if count:
                self.reporter.note(f"{path}: {count} records were passed over: {reason}")
        return found

    def _hold_back(self, path: Path, rows: list[Answered]) -> list[Answered]:
        """Some of a file's prompts, which are no longer trained on.

        Raises:
            InputError: there are too few.
        """
        count = len(rows)
        held = hold_back(rows, range(count), self.config.eval_rows, (self.config.loop.seed, count))
        if not held:
            raise InputError(
                f"{path} has {count} prompts with answers, of which a tenth is to be held back; give ten or more, or "
                "held-out data with --valid NAME=FILE"
            )
        return held

    def tokens(self) -> int:
        """Those of the rows as long as they are, without what fills them up."""
        return self.questions.tokens

    def loss(self, model: Any, batch: Rows) -> Tensor:
        """See `Recipe`."""
        return self.rows_loss(batch)

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """See `Recipe`."""
        adam = self.config.adam
        betas = (adam.beta1, adam.beta2)
        made = AdamW(model.parameters(), lr=adam.lr, betas=betas, weight_decay=adam.weight_decay, fused=True)
        return with_peaks([made])

    def origin(self, names: Sequence[str]) -> Origin:
        """What is written beside the trained tensors: the target, and these settings of the run."""
        values = self.config.flat()
        data = {"data": [spec.path.name for spec in self.specs], "row_tokens": list(values["row_tokens"])}
        recipe = {name: values[name] for name in names} | data
        return Origin(base=self.config.target, recipe=recipe, fingerprint=fingerprint(self.target, self.tokenizer))

    def result(self, module: nn.Module, layers: int, measures: dict[str, Any], more: dict[str, Any]) -> Result:
        """What the run has made, for its card."""
        tasks = [str(spec.path) for spec in self.tasks]
        origin = {"tasks": tasks, "held_back": self.held_back, "base": self.config.target}
        return Result(module, layers, measures, self.loop.epochs(self.specs), more | origin)


@torch.no_grad()
def as_written(trained: Module, fresh: Module) -> Module:
    """Weights in bf16, as they are written; those of the run are cast too: what is measured is what is used.

    Args:
        trained: of the run.
        fresh: a module of the same shape in bf16, which takes them.
    """
    for weight, own in zip(trained.parameters(), fresh.parameters(), strict=True):
        own.copy_(weight)
        weight.copy_(own)
    return fresh
