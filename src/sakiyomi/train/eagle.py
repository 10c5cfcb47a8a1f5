"""Train an EAGLE-3 head on a frozen target, whose hidden states are computed on the way.

Li et al. 2025, arXiv 2503.01840. The head learns the target's distribution behind every token: with the target's
features, and then step by step with its own in their place, as it will draft (`eagle_unrolled`).
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.eagle_heads.formats import EagleFile, usual_layers, write_eagle
from sakiyomi.drafters.eagle_heads.module import EagleOptions
from sakiyomi.train.config import EagleConfig
from sakiyomi.train.eagle_measures import measured, rank_continuations, worth
from sakiyomi.train.eagle_unrolled import TargetStates, UnrolledHead, head_config, new_head
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.loop import Loop
from sakiyomi.train.losses import soft_loss
from sakiyomi.train.medusa_measures import HeadLog
from sakiyomi.train.optim import text_optimizers
from sakiyomi.train.plot import plot_heads
from sakiyomi.train.recipe import train
from sakiyomi.train.taught import Taught
from sakiyomi.train.writing import writing

__all__ = ["train_eagle", "unrolled_loss"]

PIECE = 1024
"""Tokens that are gone through at a time, target and all: their activations stay in the caches of a CPU."""


def train_eagle(config: EagleConfig, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train eagle`, see `recipe.train`."""
    return train(_Eagle(config), command)


class _Eagle(Taught[EagleConfig]):
    """One decoder layer learns to foretell the target from its hidden states."""

    def check_target(self) -> None:
        """See `Taught`."""
        config, text = self.config, self.target.config.get_text_config()
        count = int(text.num_hidden_layers)
        reads = config.reads or tuple(min(max(layer, 0), count - 1) for layer in usual_layers(count))
        if max(reads) >= count:
            raise InputError(
                f"reads is {reads}, and {config.target} has {count} layers; set --reads to 0 .. {count - 1}"
            )
        if config.draft_vocab > self.vocab:
            raise InputError(
                f"draft_vocab is {config.draft_vocab}, and {config.target} has {self.vocab} tokens; set --draft-vocab "
                "lower, or 0 for all"
            )
        self.sizes = head_config(self.target, kv_heads=config.kv_heads, intermediate=config.intermediate)
        heads, kv_heads = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        if heads % kv_heads:
            raise InputError(
                f"kv_heads is {kv_heads}, expected a divisor of the target's {heads} heads; set --kv-heads"
            )
        self.options = EagleOptions(layers=reads, target_size=int(text.hidden_size))

    def loop(self) -> Loop:
        """See `Recipe`."""
        config = self.config
        self.known = _frequent(config, self.texts, self.vocab)
        self.head = head = new_head(self.target, self.sizes, self.options, self.known)
        head.head.requires_grad_(config.own_head)
        self.states = TargetStates(self.target, self.options.layers)
        self.log = HeadLog(self.workers.log(Path(config.loop.out) / "steps.jsonl"), config.loop.resume)
        rows = max(1, PIECE // config.loop.row_tokens[0])

        def batch_loss(_: nn.Module, ids: Tensor) -> Tensor:
            pieces, each = ids.split(rows), torch.zeros(config.unroll)
            for piece in pieces:
                own = unrolled_loss(config, head, self.states, piece, self.known) * (len(piece) / len(ids))
                with torch.autocast(ids.device.type, enabled=False):
                    (own @ _weights(config)).backward()
                torch.clear_autocast_cache()  # copies of weights belong to a graph that is gone
                each += own.detach()
            self.log.add(loop.progress.step, self.workers.mean(each))
            return (each * _weights(config)).sum()

        loop = Loop(
            config, head, batch_loss, self.mixture, lambda _: self._measures(), optimizers=text_optimizers(config)
        )
        return loop

    def hooks(self) -> AbstractContextManager[object]:
        """See `Recipe`."""
        return closing(self.log)

    def _measures(self) -> dict[str, dict[str, float]]:
        return {
            name: measured(rank_continuations(self.head, self.states, self.known, texts))
            for name, texts in self.held_out.items()
        }

    def finish(self, loop: Loop) -> Result:
        """See `Recipe`."""
        config, head, folder = self.config, self.head, model_folder(self.config)
        with torch.no_grad():
            for weight in head.parameters():  # as they are written: what is measured is what is used
                weight.copy_(weight.bfloat16())
        ranks = {n: rank_continuations(head, self.states, self.known, texts) for n, texts in self.held_out.items()}
        accuracies = {name: found.accuracies() for name, found in ranks.items()}
        with writing(folder):
            write_eagle(folder, self._file(), config.target)
            plot_heads(self.log.curve(), accuracies, folder / "accuracy.png", "position")
        about = (
            f"An EAGLE-3 head for {config.target}, which reads its layers {', '.join(map(str, self.options.layers))}"
        )
        if self.known is not None:
            about += f" and proposes {len(self.known)} of its tokens"
        measures = {name: measured(found) for name, found in ranks.items()}
        del self.target, self.states  # two targets need not fit
        gc.collect()
        self.reporter.note("measuring tau and speed with the engine")
        for name, values in worth(config.target, str(folder), self.held_out, config.loop.compile).items():
            measures[name] |= values
        more = {
            "about": about,
            "measured_on": f"On what {config.target} answers to held-out prompts, greedily: position k is right where "
            "the head's first guess is what comes, all draft tokens before it being right. Trees of 16 nodes: a fixed "
            "one, and, with the engine, one grown by the head's confidence (tree tau). Speed-ups are those of the "
            "engine, which chooses sizes itself, against its plain decoding on the machine of the run.",
            "held_back": self.held_back,
            "base": config.target,
            "use": f"sakiyomi generate --target {config.target} --draft eagle:{folder} 'Once upon a time'",
        }
        return Result(head, 1, measures, loop.epochs(self.sources), more)

    def _file(self) -> EagleFile:
        head, layer = self.head, self.head.layers[1]
        tensors = {
            "fc.weight": head.layers[0].weight,
            "norm.weight": head.norm.weight,
            "lm_head.weight": head.head.weight,
        }
        tensors |= {f"layers.0.{name}": weight for name, weight in layer.named_parameters()}
        rounded = {name: weight.detach().bfloat16() for name, weight in tensors.items()}
        return EagleFile(self.sizes | {"dtype": "bfloat16"}, self.options, rounded, self.known, "")


def unrolled_loss(
    config: EagleConfig, head: UnrolledHead, states: TargetStates, ids: Tensor, known: Tensor | None
) -> Tensor:
    """Mean loss of each step, (steps,), in nats or, for "tv", as a share.

    Args:
        config: of the run.
        head: that learns.
        states: of the target.
        ids: (B, T + 1) tokens.
        known: the target's tokens that the head proposes, ascending; None: all.
    """
    joined, last = states(ids)
    wanted, counts = states.probs(last[:, 1:].flatten(0, 1), known)
    if config.greedy_weight:
        best = wanted.argmax(1, keepdim=True)
        more = torch.full_like(best, config.greedy_weight, dtype=wanted.dtype)
        wanted = wanted.scatter_add_(1, best, more).div_(1 + config.greedy_weight)
    found = []
    for step, hidden in enumerate(head(ids[:, 1:], joined[:, :-1], config.unroll)):
        weights = counts.view(hidden.shape[:2]).float()
        weights[:, :step] = 0
        found.append(soft_loss(hidden.flatten(0, 1), head.head.weight, wanted, weights.flatten(), config.loss))
    return torch.stack(found)


def _weights(config: EagleConfig) -> Tensor:
    """Of the steps; they sum to 1."""
    weights = config.step_decay ** torch.arange(config.unroll)
    return weights / weights.sum()


def _frequent(config: EagleConfig, texts: list[list[Any]], vocab: int) -> Tensor | None:
    """The most frequent tokens of the documents, ascending; None: all are proposed."""
    if not config.draft_vocab or config.draft_vocab == vocab:
        return None
    counts = sum(np.bincount(np.concatenate(documents), minlength=vocab) for documents in texts)
    chosen = np.argsort(-np.asarray(counts), kind="stable")[: config.draft_vocab]
    return torch.from_numpy(np.sort(chosen))
