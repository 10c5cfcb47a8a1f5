"""Train retaining heads (Locret): heads that score keys and values of a frozen target (see `heads_loss`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from sakiyomi.cache.policies.retaining.formats import write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape, default_width
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.train.answered import Questions
from sakiyomi.train.beside import BesideTarget, as_written
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.commands import TrainRetaining
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.heads_loss import TOP, HeadsLoss, Measured
from sakiyomi.train.loop import Loop, on_device
from sakiyomi.train.plot import plot_overlaps
from sakiyomi.train.recipe import train
from sakiyomi.train.retaining_labels import kv_heads_of

TIMED = 5  # steps that are timed beside plain passes, the first of which warms up


def train_retaining(config: TrainRetaining, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train retaining`, see `recipe.train`."""
    return train(_Retaining(config), command)


class _Retaining(BesideTarget[TrainRetaining]):
    """Heads learn which keys and values the answers look at."""

    clip_values = True

    def check_target(self) -> None:
        """See `BesideTarget`."""
        self.kv_heads, self.widths = kv_heads_of(self.target), Raw(self.target).widths

    def make(self) -> nn.Module:
        """See `Recipe`."""
        config, text = self.config, self.target.config.get_text_config()
        activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None) or "silu"
        width = config.width or default_width(int(text.hidden_size))
        self.heads = RetainingHeads(RetainingShape(self.widths, self.kv_heads, width, str(activation))).to(self.device)
        self.rows_loss = self.heads_loss = HeadsLoss(config, self.target, self.heads)
        return self.heads

    def hooks(self) -> AbstractContextManager[object]:
        """See `Recipe`."""
        return self.heads_loss.hooks()

    def finish(self) -> Result:
        """See `Recipe`."""
        config, folder, heads = self.config, model_folder(self.config), self.heads
        names = ("labels", "queries", "query_aware", "query_tokens", "smooth", "huber", "tasks", "seed")
        with writing(folder):
            written = as_written(heads, RetainingHeads(heads.shape, torch.bfloat16))
            write_heads(written, folder, config=self.target.config, **self.origin(names))
        with self.hooks():
            found = self._measured()
        overlaps = {name: one.overlap for name, one in found.items()}
        with writing(folder):
            drawn = plot_overlaps(self.loop.progress, overlaps, folder / "overlap.png")
        shape, aware = heads.shape, ", for prompts with the question in front" if config.query_aware else ""
        more = {
            "about": f"Retaining heads (Locret) of width {shape.hidden} for the {shape.layers} layers of "
            f"{config.target}{aware}",
            "unit": "",
            "measured_on": f"Of a held-out prompt's tokens, labels and heads each choose {TOP:.0%}, in every layer and "
            f"KV head: `overlap` is the share of the labels' choice that is the heads' too; chance is {TOP:g}, "
            "`recent` the share that the prompt's last tokens have.",
            "overlaps": overlaps,
            "accuracy_curve": "overlap.png" if drawn else None,
            "throughput": _throughput(self.loop, self.heads_loss, self.questions, self.device),
        }
        measures = {name: one.values() for name, one in found.items()}
        return self.result(heads, shape.layers, measures, more)

    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """See `Recipe`."""
        return {name: one.values() for name, one in self._measured().items()}

    def _measured(self) -> dict[str, Measured]:
        return {name: self.heads_loss.measure(batch) for name, batch in self.held_out.items()}


def _throughput(loop: Loop, loss: HeadsLoss, questions: Questions, device: torch.device) -> dict[str, Any]:
    """Steps of the finished run beside the target's plain passes over their rows."""
    length = max(loop.config.row_tokens)
    steps, passes = [], []
    for i in range(TIMED + 1):
        batch = questions.batch(loop.progress.step + i, loop.config.step_tokens // length, length, True)
        with loss.hooks():
            steps.append(_seconds(partial(loop.learn, batch), device))
        passes.append(_seconds(partial(loss.passes, on_device(batch, device)), device))
    return {
        "step_ms": 1000 * statistics.median(steps[1:]),
        "forward_ms": 1000 * statistics.median(passes[1:]),
        "ratio": statistics.median(a / b for a, b in zip(steps[1:], passes[1:], strict=True)),
    }


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
