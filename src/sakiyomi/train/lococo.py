"""Train convolutions (LoCoCo) that merge what a cache drops, beside a frozen target.

Cai et al. 2024, arXiv 2406.05317, section 4: the language model's own loss on what comes after chunks whose keys and
values were merged; nothing but the convolutions is trained.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sakiyomi.cache.policies.merging.convolutions import Convolutions, MergingShape
from sakiyomi.cache.policies.merging.formats import write_merging
from sakiyomi.train.beside import BesideTarget, Rows, as_written
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.commands import TrainLococo
from sakiyomi.train.compressed import Compressed, policy_of
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.loop import compiled_loss
from sakiyomi.train.recipe import train


def train_lococo(config: TrainLococo, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train lococo`, see `recipe.train`."""
    return train(_Lococo(config), command)


class _Lococo(BesideTarget[TrainLococo]):
    """Convolutions learn to merge what goes into what stays."""

    marked = True

    def check(self) -> None:
        """See `Recipe`."""
        config = self.config
        self.policy = policy_of(config.scores, config.kv_budget, config.merged)
        super().check()

    def make(self) -> nn.Module:
        """See `Recipe`."""
        config, target = self.config, self.target
        self.compressed = Compressed(target, self.policy, config.kv_budget, config.chunk_size)
        shape = MergingShape(
            tuple((layer.key_dim, layer.value_dim) for layer in self.compressed.shapes),
            tuple(layer.heads for layer in self.compressed.shapes),
            config.merged,
            config.kernel,
            config.again,
        )
        self.convolutions = Convolutions(shape, norm=config.norm).to(self.device)
        self.rows_loss = self.merging_loss = MergingLoss(config, self.compressed, self.convolutions)
        self.beside = self._beside() if self.workers.leads else {}
        return self.convolutions

    def _beside(self) -> dict[str, dict[str, float]]:
        """Losses of held-out answers with evicted pairs dropped, and with all pairs kept."""
        config = self.config
        whole = MergingLoss(config, Compressed(self.target, self.policy, 0, config.chunk_size), None)
        with self.compressed.hooks():
            dropped = {name: self.merging_loss.measure(batch, None) for name, batch in self.held_out.items()}
        with whole.passes.hooks():
            full = {name: whole.measure(batch, None) for name, batch in self.held_out.items()}
        return {name: {"dropped": dropped[name], "full": full[name]} for name in self.held_out}

    def hooks(self) -> AbstractContextManager[object]:
        """See `Recipe`."""
        return self.compressed.hooks()

    def finish(self) -> Result:
        """See `Recipe`."""
        config, folder, convolutions = self.config, model_folder(self.config), self.convolutions
        names = ("scores", "kv_budget", "chunk_size", "norm", "tasks", "text_weight", "seed")
        with writing(folder):
            written = as_written(convolutions, Convolutions(convolutions.shape, torch.bfloat16))
            write_merging(written, folder, **self.origin(names))
        more = {
            "about": f"Convolutions (LoCoCo) that merge what a cache of {config.target} drops into {config.merged} "
            f"pairs of each head in its {len(convolutions.shape.dims)} layers",
            "measured_on": f"Losses of held-out answers after a prompt of which {config.kv_budget} pairs stay, chosen "
            f"by `{self.policy.name}`: with {config.merged} of them merged, with what goes `dropped`, and with "
            "everything kept (`full`).",
        }
        with self.hooks():
            measures = self.measures(None)
        return self.result(convolutions, convolutions.shape.layers, measures, more)

    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """See `Recipe`."""
        return {
            name: {"nats_per_token": self.merging_loss.measure(batch, self.convolutions)} | self.beside[name]
            for name, batch in self.held_out.items()
        }


class MergingLoss:
    """The target's loss on rows whose beginning was merged.

    Args:
        config: of the run.
        passes: of the target.
        convolutions: being trained; None: nothing is merged.
    """

    def __init__(self, config: TrainLococo, passes: Compressed, convolutions: Convolutions | None) -> None:
        self._text_weight, self._first = config.text_weight, config.chunk_size
        self.passes, self._convolutions = passes, convolutions
        self._nats = compiled_loss(_nats, config.loop.compile, dynamic=True)

    def __call__(self, rows: Rows) -> Tensor:
        """Mean loss of a batch's rows, with marks, without gradient: that is in the convolutions already."""
        total = torch.zeros((), device=rows[0][0].device)
        for ids, prompt in rows:
            loss = self._row(ids, prompt, self._convolutions) / len(rows)
            if loss.requires_grad:  # not where a prompt fits into the budget
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def measure(self, rows: Rows, convolutions: Convolutions | None) -> float:
        """Mean loss of a batch's rows, in nats per token."""
        return sum(float(self._row(ids, prompt, convolutions)) for ids, prompt in rows) / len(rows)

    def _row(self, marked: Tensor, prompt: int, convolutions: Convolutions | None) -> Tensor:
        ids = torch.where(marked < 0, ~marked, marked)
        places = torch.arange(len(ids), device=ids.device)
        weights = torch.where(places < prompt, self._text_weight, 1.0) * (marked >= 0) * (places > self._first)
        losses, counted = [], weights.sum().clamp(min=1e-6)
        for first, hidden in self.passes(ids, prompt, convolutions):
            following = slice(first + 1, first + 1 + len(hidden))
            own, wanted = weights[following], ids[following]
            asked = own.nonzero()[:, 0]  # logits of other rows are not needed
            losses.append((self._nats(hidden[asked], self.passes.head, wanted[asked]) * own[asked]).sum())
        return torch.stack(losses).sum() / counted


def _nats(hidden: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head.to(hidden.dtype)).float(), wanted, reduction="none")
