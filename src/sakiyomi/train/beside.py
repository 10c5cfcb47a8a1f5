"""What recipes share that train something beside a frozen target, on prompts with answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from sakiyomi.model_executor.loading.model import parse_device
from sakiyomi.train.config import AnsweredConfig
from sakiyomi.train.data import parse_text
from sakiyomi.train.draft import load_target
from sakiyomi.train.loop import Loop, accelerator, on_device
from sakiyomi.train.optim import with_peaks
from sakiyomi.train.prompts import check_prompts, read_prompts
from sakiyomi.train.recipe import Recipe

__all__ = ["BesideTarget", "rounded"]

Settings = TypeVar("Settings", bound=AnsweredConfig)
Module = TypeVar("Module", bound=nn.Module)


class BesideTarget(Recipe[Settings]):
    """A recipe whose target is frozen.

    Attributes:
        device: where the target is.
        target, tokenizer: of the run.
        given: prompts with answers to learn from.
        held_out: such prompts on the device, by file or task.
    """

    def check(self) -> None:
        """See `Recipe`."""
        parse_device(self.config.device)
        check_prompts(self.config)

    def read(self) -> None:
        """See `Recipe`."""
        config = self.config
        self.device = accelerator(config.device, config.precision).device
        self.target, self.tokenizer = load_target(config.target)
        nn.Module.to(self.target, self.device)
        self.look()
        self.given = read_prompts(config, self.target, self.tokenizer, self.reporter, marked=self.marked)
        self.held_out = {name: on_device(batch, self.device) for name, batch in self.given.held_out.items()}

    marked = False
    """Whether prompts are read with marks, see `TaskRows`."""

    def look(self) -> None:
        """Refuse a target that is not fit for it, before the data is read."""

    def tokens(self, loop: Loop) -> int:
        """Those of the rows as long as they are, and not as they are filled up."""
        return self.given.questions.tokens

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """AdamW with the settings of the run."""
        adam = self.config.adam
        betas = (adam.beta1, adam.beta2)
        made = AdamW(model.parameters(), lr=adam.lr, betas=betas, weight_decay=adam.weight_decay, fused=True)
        return with_peaks([made])

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        """What a user of the result may have to know of its training."""
        values = self.config.flat()
        data = [Path(parse_text(spec).path).name for spec in self.config.data]
        return {name: values[name] for name in names} | {"data": data, "row_tokens": list(values["row_tokens"])}

    def origin(self) -> dict[str, Any]:
        """What the card says of the data and the target."""
        return {"tasks": self.given.tasks, "held_back": self.given.held_back, "base": self.config.target}


@torch.no_grad()
def rounded(trained: Module, fresh: Module) -> Module:
    """Weights in bf16, as they are written; those of the run are rounded too: what is measured is what is used.

    Args:
        trained: of the run.
        fresh: a module of the same shape in bf16, which takes them.
    """
    for weight, own in zip(trained.parameters(), fresh.parameters(), strict=True):
        own.copy_(weight)
        weight.copy_(own)
    return fresh
