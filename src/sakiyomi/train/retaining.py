"""`sakiyomi train retaining`: heads that score keys and values of a frozen target (see `heads_loss`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.policies.retaining.formats import write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape, default_width
from sakiyomi.cache.policies.retaining.raw import Raw, out_features
from sakiyomi.train.answered import Questions, split_rows
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


# ---------------------------------------------------------------- operations


GPU = 150e12
"""Operations a second: about half of an A100's or A800's peak in bf16, the rate of the paper's own 0.80 GPU-hours."""


@dataclass(frozen=True)
class Shape:
    """What counts of a model and its heads.

    Attributes:
        linear: weights of the linear layers, without the head over the vocabulary.
        layers, heads, dim: of attention.
        retaining: weights of the heads' first and second layers.
    """

    linear: int
    layers: int
    heads: int
    dim: int
    retaining: tuple[int, int]


LLAMA_8B = Shape(6_979_321_856, 32, 32, 128, (32 * 6144 * 1024, 32 * 1024 * 8))
"""Llama 3.1 8B, with heads as wide as the paper's."""


def shape_of(target: Any, heads: RetainingShape) -> Shape:
    """Of a transformers model and its heads. Of experts all are counted, also those that a token does not come to."""
    text, head = target.config.get_text_config(), target.get_output_embeddings()
    linear = sum(module.weight.numel() for module in target.modules() if out_features(module) and module is not head)
    count = int(text.num_attention_heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // count)
    retaining = sum(heads.widths) * heads.hidden, heads.hidden * sum(heads.kv_heads)
    return Shape(linear, heads.layers, count, dim, retaining)


def operations(shape: Shape, rows: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Operations (a multiplication and an addition are two) of the target's passes over rows, and of all of a step.

    Attention is causal: a token sees half of the row. Heads go forwards and backwards without a gradient for what they
    read; labels are the products of the answer's queries and the prompt's keys.

    Args:
        shape: of the model.
        rows: tokens of each, and how many of them are the prompt's.
    """
    attention = 2 * shape.layers * shape.heads * shape.dim
    first, second = shape.retaining
    passes = sum(2 * shape.linear * length + attention * length**2 for length, _ in rows)
    heads = sum((4 * first + 6 * second) * prompt for _, prompt in rows)
    labels = sum(attention * (length - prompt) * prompt for length, prompt in rows)
    return float(passes), float(passes + heads + labels)


def paper_run(shape: Shape, steps: int = 3000, tokens: int = 10240, answer: int = 300) -> float:
    """Operations of a run of the paper's size: so many rows of a prompt of `tokens` and an answer."""
    return steps * operations(shape, [(tokens + answer, tokens)])[1]
