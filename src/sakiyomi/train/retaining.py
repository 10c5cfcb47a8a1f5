"""`sakiyomi train retaining`: heads that score keys and values of a frozen target (see `heads_loss`)."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from sakiyomi.cache.policies.retaining.formats import fingerprint, write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape, default_width
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.model_executor.loading.model import parse_device
from sakiyomi.train.answered import Questions, split_rows
from sakiyomi.train.config import RetainingConfig
from sakiyomi.train.data import parse_text
from sakiyomi.train.draft import load_target
from sakiyomi.train.export import model_folder, write_card
from sakiyomi.train.heads_loss import TOP, HeadsLoss
from sakiyomi.train.loop import Loop, accelerator, on_device
from sakiyomi.train.operations import GPU, LLAMA_8B, operations, paper_run, shape_of
from sakiyomi.train.optim import with_peaks
from sakiyomi.train.plot import plot_overlaps
from sakiyomi.train.prompts import check_prompts, read_prompts
from sakiyomi.train.report import Reporter
from sakiyomi.train.retaining_labels import kv_heads_of
from sakiyomi.train.writing import writing

__all__ = ["train_retaining"]

TIMED = 5  # steps that are timed beside plain passes, the first of which warms up


def train_retaining(config: RetainingConfig, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train retaining`.

    Args:
        config: the settings.
        command: the command line, for the card.

    Returns:
        The summary that `--json` prints; `finished` is False after SIGINT.

    Raises:
        InputError, LoadError, UnsupportedError: before any work is done, where that is possible.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    check_prompts(config)
    device = _device(config)
    target, tokenizer = load_target(config.target)
    nn.Module.to(target, device)
    kv_heads, raw = kv_heads_of(target), Raw(target)
    reporter = Reporter(config.log_seconds)
    text = target.config.get_text_config()
    given = read_prompts(config, target, tokenizer, reporter)
    questions = given.questions
    checked = {name: on_device(batch, device) for name, batch in given.held_out.items()}
    torch.manual_seed(config.seed)
    activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None) or "silu"
    shape = RetainingShape(raw.widths, kv_heads, config.width or default_width(int(text.hidden_size)), str(activation))
    heads = RetainingHeads(shape).to(device)
    loss = HeadsLoss(config, target, heads)
    loop = Loop(
        config,
        heads,
        lambda _, batch: loss(batch),
        questions,
        lambda _: {name: loss.measure(batch).values() for name, batch in checked.items()},
        optimizers=_optimizers(config),
        device=str(device),
        precision=config.precision,
        warmup_share=config.warmup_share,
        clip_values=True,
    )
    folder = model_folder(config)
    with loss.listening():
        if not loop.run():
            return {"finished": False, "out": config.out, "step": loop.progress.step, "tokens": questions.tokens}
        with writing(folder):
            write_heads(
                _rounded(heads),
                folder,
                config=target.config,
                base=config.target,
                recipe=_recipe(config),
                fingerprint=fingerprint(target, tokenizer),
            )
        found = {name: loss.measure(batch) for name, batch in checked.items()}
    overlaps = {name: one.overlap for name, one in found.items()}
    with writing(folder):
        drawn = plot_overlaps(loop.progress, overlaps, folder / "overlap.png")
    progress = dataclasses.replace(loop.progress, tokens=questions.tokens)
    throughput = _throughput(config, loop, loss, questions, target, shape)
    reporter.note(throughput["explained"])
    return write_card(
        config,
        heads,
        progress,
        {name: one.values() for name, one in found.items()},
        command,
        given.epochs(),
        about=_about(config, shape),
        unit="",
        measured_on=f"Of a held-out prompt's tokens, labels and heads each choose {TOP:.0%}, in every layer and KV "
        f"head: `overlap` is the share of the labels' choice that is the heads' too; chance is {TOP:g}, `recent` the "
        "share that the prompt's last tokens have.",
        tasks=given.tasks,
        held_back=given.held_back,
        base=config.target,
        overlaps=overlaps,
        accuracy_curve="overlap.png" if drawn else None,
        throughput=throughput,
    )


def _device(config: RetainingConfig) -> torch.device:
    parse_device(config.device)
    found: torch.device = accelerator(config.device, config.precision).device
    return found


def _about(config: RetainingConfig, shape: RetainingShape) -> str:
    aware = ", for prompts with the question in front" if config.query_aware else ""
    return f"Retaining heads (Locret) of width {shape.hidden} for the {shape.layers} layers of {config.target}{aware}"


def _recipe(config: RetainingConfig) -> dict[str, Any]:
    """What a user of the heads may have to know of their training."""
    names = ("labels", "queries", "query_aware", "query_tokens", "smooth", "huber", "tasks", "seed")
    data = [Path(parse_text(spec).path).name for spec in config.data]
    return {name: getattr(config, name) for name in names} | {"data": data, "row_tokens": list(config.row_tokens)}


@torch.no_grad()
def _rounded(heads: RetainingHeads) -> RetainingHeads:
    """The heads in bf16, as they are written; those of the run are rounded too: what is measured is what is used."""
    found = RetainingHeads(heads.shape, torch.bfloat16)
    for weight, own in zip(heads.parameters(), found.parameters(), strict=True):
        own.copy_(weight)
        weight.copy_(own)
    return found


def _optimizers(config: RetainingConfig) -> Callable[[nn.Module], list[Optimizer]]:
    def make(model: nn.Module) -> list[Optimizer]:
        betas = (config.beta1, config.beta2)
        found = AdamW(model.parameters(), lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=True)
        return with_peaks([found])

    return make


# ---------------------------------------------------------------- time


def _throughput(
    config: RetainingConfig, loop: Loop, loss: HeadsLoss, questions: Questions, target: Any, shape: RetainingShape
) -> dict[str, Any]:
    """Steps of the finished run beside the target's plain passes over their rows, and what an 8B target would take."""
    device, length = target.device, max(config.row_tokens)
    steps, passes, whole = [], [], []
    sizes = shape_of(target, shape)
    for i in range(TIMED + 1):
        batch = questions.batch(loop.progress.step + i, config.step_tokens // length, length, True)
        with loss.listening():
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
