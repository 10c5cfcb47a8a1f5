"""What recipes share that train a head beside a frozen target, whose hidden states are computed on the way.

Nothing is stored but the head: a piece of a batch goes through the target and the head, its gradient is added, and its
activations are forgotten.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.train.acceptance import MEASURING, Continuations, measured, measured_on, worth
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.config import HeadConfig, LayersConfig
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.hidden import TargetStates, layer_config
from sakiyomi.train.medusa_measures import HeadLog
from sakiyomi.train.plot import plot_heads
from sakiyomi.train.taught import Taught

PIECE = 512
"""Tokens that are gone through at a time, target and all: their activations stay in the caches of a CPU."""
Settings = TypeVar("Settings", bound=HeadConfig)
LayersSettings = TypeVar("LayersSettings", bound=LayersConfig)


class HeadRecipe(Taught[Settings]):
    """A head learns to foretell the target from its hidden states, several tokens ahead.

    Attributes:
        reads: layers of the target whose outputs the head reads; none: it reads what the target's head reads.
        head: that learns.
        layers: decoder layers of it.
        states: of the target.
        positions_ahead: tokens that it foretells, each with a loss of its own.
    """

    kind: ClassVar[str]
    """What stands before the head's folder in a draft."""
    head: nn.Module
    reads: tuple[int, ...] = ()
    layers = 1
    positions_ahead: int

    @abstractmethod
    def new_head(self) -> nn.Module:
        """The head before it has learnt anything."""

    @abstractmethod
    def losses(self, ids: Tensor, step: int) -> Tensor:
        """Mean loss of each position ahead on (B, T + 1) tokens, in nats or, for "tv", as a share."""

    @abstractmethod
    def ranks(self, texts: Continuations) -> Ranks:
        """Where the target's own greedy tokens stand among the head's guesses: by place, and how far ahead."""

    @abstractmethod
    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
        """Write the head; what it is, for the card, and what was written.

        Args:
            folder: is made.
            tensors: all parameters, as they are written; some are the target's.
        """

    # ------------------------------------------------------------ a run

    def make(self) -> nn.Module:
        """See `Recipe`."""
        config = self.config
        self.head = self.new_head()
        self.states = TargetStates(self.target, self.reads)
        self.log = HeadLog(self.workers.log(Path(config.loop.out) / "steps.jsonl"), config.loop.resume)
        shares = config.step_decay ** torch.arange(self.positions_ahead)
        self.shares = shares / shares.sum()
        return self.head

    def loss(self, model: Any, ids: Tensor) -> Tensor:
        """See `Recipe`; a piece of the batch at a time."""
        step, pieces = self.loop.progress.step, ids.split(max(1, PIECE // self.config.loop.row))
        each = torch.zeros(self.positions_ahead)
        first = (step * self.workers.count + self.workers.number) * len(pieces)
        for place, piece in enumerate(pieces):
            own = self.losses(piece, first + place) * (len(piece) / len(ids))
            with torch.autocast(ids.device.type, enabled=False):
                (own @ self.shares).backward()
            torch.clear_autocast_cache()  # copies of weights belong to a graph that is gone
            each += own.detach()
        self.log.add(step, self.workers.mean(each))
        return (each * self.shares).sum()

    def wanted(self, last: Tensor, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the head should give, see `TargetStates.probs`; the likeliest token has `greedy_weight` more."""
        wanted, counts = self.states.probs(last, known)
        if weight := self.config.greedy_weight:
            best = wanted.argmax(1, keepdim=True)
            more = torch.full_like(best, weight, dtype=wanted.dtype)
            wanted = wanted.scatter_add_(1, best, more).div_(1 + weight)
        return wanted, counts

    def hooks(self) -> AbstractContextManager[object]:
        """See `Recipe`."""
        return closing(self.log)

    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """See `Recipe`."""
        return {name: measured(self.ranks(texts)) for name, texts in self.held_out.items()}

    def finish(self) -> Result:
        """See `Recipe`."""
        config, folder = self.config, model_folder(self.config)
        with torch.no_grad():
            for weight in self.head.parameters():  # as they are written: what is measured is what is used
                weight.copy_(weight.bfloat16())
        ranks = {name: self.ranks(texts) for name, texts in self.held_out.items()}
        accuracies = {name: found.accuracies() for name, found in ranks.items()}
        with writing(folder):
            about, written = self.write(folder, {n: w.detach().bfloat16() for n, w in self.head.named_parameters()})
            plot_heads(self.log.curve(), accuracies, folder / "accuracy.png", "position")
        measures = {name: measured(found) for name, found in ranks.items()}
        del self.target, self.states  # two targets need not fit
        gc.collect()
        self.reporter.note(MEASURING)
        draft = f"{self.kind}:{folder}"
        for name, values in worth(config.target, draft, self.held_out, config.loop.compile).items():
            measures[name] |= values
        more = {
            "about": about,
            "parameters": sum(tensor.numel() for tensor in written.values()),
            "measured_on": measured_on(config.target),
            "held_back": self.held_back,
            "base": config.target,
            "use": f"sakiyomi generate --target {config.target} --draft {draft} 'Once upon a time'",
        }
        return Result(self.head, self.layers, measures, self.loop.epochs(self.sources), more)


class LayersRecipe(HeadRecipe[LayersSettings]):
    """A head with layers of its own kind, which reads the outputs of some of the target's layers.

    Attributes:
        sizes: of the head's decoder layers, as transformers has them.
    """

    @abstractmethod
    def usual_reads(self, layers: int) -> tuple[int, ...]:
        """The method's own choice of layers of a target that has so many."""

    def check_target(self) -> None:
        """See `Taught`."""
        super().check_target()
        config, text = self.config, self.target.config.get_text_config()
        count = int(text.num_hidden_layers)
        self.reads = config.reads or tuple(min(max(layer, 0), count - 1) for layer in self.usual_reads(count))
        if max(self.reads) >= count:
            raise InputError(
                f"reads is {self.reads}, and {config.target} has {count} layers; set --reads to 0 .. {count - 1}"
            )
        self.sizes = layer_config(self.target, kv_heads=config.kv_heads, intermediate=config.intermediate)
        heads, kv_heads = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        if heads % kv_heads:
            raise InputError(
                f"kv_heads is {kv_heads}, expected a divisor of the target's {heads} heads; set --kv-heads"
            )
