"""`sakiyomi train retaining`: heads that score keys and values of a frozen target (see `heads_loss`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.policies.retaining.formats import write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape, default_width
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.train.answered import Questions, split_rows
from sakiyomi.train.beside import BesideTarget, as_written
from sakiyomi.train.commands import TrainRetaining
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.heads_loss import TOP, HeadsLoss, Measured
from sakiyomi.train.loop import Loop, on_device
from sakiyomi.train.operations import GPU, LLAMA_8B, operations, paper_run, shape_of
from sakiyomi.train.plot import plot_overlaps
from sakiyomi.train.recipe import train
from sakiyomi.train.retaining_labels import kv_heads_of
from sakiyomi.train.writing import writing

TIMED = 5  # steps that are timed beside plain passes, the first of which warms up


def train_retaining(config: TrainRetaining, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train retaining`, see `recipe.train`."""
    return train(_Retaining(config), command)


class _Retaining(BesideTarget[TrainRetaining]):
    """Heads learn which keys and values the answers look at."""

    def check_target(self) -> None:
        """See `BesideTarget`."""
        self.kv_heads, self.widths = kv_heads_of(self.target), Raw(self.target).widths

    def make(self) -> nn.Module:
        """See `Recipe`."""
        config, text = self.config, self.target.config.get_text_config()
        activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None) or "silu"
        width = config.width or default_width(int(text.hidden_size))
        self.heads = RetainingHeads(RetainingShape(self.widths, self.kv_heads, width, str(activation))).to(self.device)
        self.heads_loss = HeadsLoss(config, self.target, self.heads)
        self.loop_options = {"warmup_share": config.warmup_share, "clip_values": True}
        return self.heads

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """See `Recipe`."""
        return self.heads_loss(batch)

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
        throughput = _throughput(config, self.loop, self.heads_loss, self.questions, self.target, heads.shape)
        self.reporter.note(throughput["explained"])
        more = {
            "about": _about(config, heads.shape),
            "unit": "",
            "measured_on": f"Of a held-out prompt's tokens, labels and heads each choose {TOP:.0%}, in every layer and "
            f"KV head: `overlap` is the share of the labels' choice that is the heads' too; chance is {TOP:g}, "
            "`recent` the share that the prompt's last tokens have.",
            "overlaps": overlaps,
            "accuracy_curve": "overlap.png" if drawn else None,
            "throughput": throughput,
        }
        measures = {name: one.values() for name, one in found.items()}
        return self.result(heads, heads.shape.layers, measures, more)

    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """See `Recipe`."""
        return {name: one.values() for name, one in self._measured().items()}

    def _measured(self) -> dict[str, Measured]:
        return {name: self.heads_loss.measure(batch) for name, batch in self.held_out.items()}


def _about(config: TrainRetaining, shape: RetainingShape) -> str:
    aware = ", for prompts with the question in front" if config.query_aware else ""
    return f"Retaining heads (Locret) of width {shape.hidden} for the {shape.layers} layers of {config.target}{aware}"


# ---------------------------------------------------------------- time


def _throughput(
    config: TrainRetaining, loop: Loop, loss: HeadsLoss, questions: Questions, target: Any, shape: RetainingShape
) -> dict[str, Any]:
    """Steps of the finished run beside the target's plain passes over their rows, and what an 8B target would take."""
    device, length = target.device, max(config.loop.row_tokens)
    steps, passes, whole = [], [], []
    sizes = shape_of(target, shape)
    for i in range(TIMED + 1):
        batch = questions.batch(loop.progress.step + i, config.loop.step_tokens // length, length, True)
        with loss.hooks():
            steps.append(_seconds(lambda batch=batch: loop.learn(batch), device))  # type: ignore[misc]
        passes.append(_seconds(lambda batch=batch: loss.passes(on_device(batch, device)), device))  # type: ignore[misc]
        rows = [(len(ids), prompt) for ids, prompt in split_rows(on_device(batch, device))]
        whole.append(operations(sizes, rows)[1])
    step, forward = (1000 * statistics.median(times[1:]) for times in (steps, passes))
    rate = statistics.median(done / seconds for done, seconds in zip(whole[1:], steps[1:], strict=True))
    needed = paper_run(LLAMA_8B)
    here, there = (needed / each / 3600 for each in (rate, GPU))
    explained = (
        f"an 8B target (Llama 3.1's shape, heads 1024 wide, 3000 rows of 10,240 tokens) needs {needed:.2g} operations: "
        f"{here:.3g} hours on this {device.type} at the {rate:.2g} operations a second of these steps, about "
        f"{there:.2g} GPU-hours at {GPU:.2g} (half of an A100's peak)"
    )
    return {
        "step_ms": step,
        "forward_ms": forward,
        "ratio": statistics.median(a / b for a, b in zip(steps[1:], passes[1:], strict=True)),
        "operations_per_second": rate,
        "hours_8b_here": here,
        "gpu_hours_8b": there,
        "explained": explained,
    }


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
