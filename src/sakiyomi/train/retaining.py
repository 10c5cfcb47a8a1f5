"""`sakiyomi train retaining`: heads that score keys and values of a frozen target (see `heads_loss`)."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from sakiyomi.errors import InputError
from sakiyomi.loading.model import parse_device
from sakiyomi.retaining.formats import fingerprint, write_heads
from sakiyomi.retaining.heads import RetainingHeads, RetainingShape, default_width
from sakiyomi.retaining.labels import kv_heads_of
from sakiyomi.retaining.raw import Raw
from sakiyomi.train.answered import Answered, Questions, TaskRows, joined, parse_tasks, read_answered, split_rows
from sakiyomi.train.config import RetainingConfig
from sakiyomi.train.data import Ids, check_shares, parse_text
from sakiyomi.train.draft import load_target
from sakiyomi.train.evaluate import parse_valid
from sakiyomi.train.export import model_folder, write_card
from sakiyomi.train.heads_loss import TOP, HeadsLoss
from sakiyomi.train.labels import vocabulary
from sakiyomi.train.loop import Loop, accelerator, on_device
from sakiyomi.train.operations import GPU, LLAMA_8B, operations, paper_run, shape_of
from sakiyomi.train.optim import with_peaks
from sakiyomi.train.plot import plot_overlaps
from sakiyomi.train.preflight import check_run
from sakiyomi.train.report import Reporter
from sakiyomi.train.writing import writing

__all__ = ["train_retaining"]

TIMED = 5  # steps that are timed beside plain passes, the first of which warms up
HELD_OUT = 1_000_003  # in the seeds of held-out tasks, so that no step of a run has them
Batch = dict[str, Ids]


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
    files, tasks = [parse_text(spec) for spec in config.data], parse_tasks(config.tasks)
    valid = parse_valid(config.valid)
    check_shares("--data and --tasks", [*files, *tasks])
    check_run(config, [])
    device = _device(config)
    target, tokenizer = load_target(config.target)
    nn.Module.to(target, device)
    kv_heads, raw = kv_heads_of(target), Raw(target)
    reporter = Reporter(config.log_seconds)
    text = target.config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", 0) or 1 << 30)
    longest = min(positions, max(config.row_tokens))
    if longest < max(config.row_tokens):
        reporter.note(f"the target has {positions} positions: prompts with their answers are at most so long")
    makers = {str(spec.path): TaskRows(str(spec.path), tokenizer, config.query_aware) for spec in tasks}

    def read(path: Path) -> list[Answered]:
        most = max(10 * config.eval_rows, config.eval_rows + _most_rows(config))  # of ten one may be held back
        query_tokens = config.query_tokens if config.query_aware else 0
        found, passed = read_answered(
            path, tokenizer, vocabulary(target), query_tokens=query_tokens, length=longest, most=most, seed=config.seed
        )
        for reason, count in passed.items():
            if count:
                reporter.note(f"{path}: {count} records were passed over: {reason}")
        return found

    given = {spec.path: read(spec.path) for spec in files}
    held = {name: read(path)[: config.eval_rows] for name, path in valid.items()}
    if not valid:
        held = {path.name: _hold_back(config, path, rows) for path, rows in given.items()}
    shares = [*files, *tasks]
    questions = Questions(
        list(given.values()),
        list(makers.values()),
        [spec.stable for spec in shares],
        [spec.decay for spec in shares],
        answer_tokens=config.answer_tokens,
        most=positions,
        first=tokenizer.bos_token_id,
        seed=config.seed,
    )
    held_out = {
        name: joined([questions.row(one, max(config.row_tokens)) for one in rows]) for name, rows in held.items()
    }
    held_out |= {name: _of_task(config, key, maker, questions) for key, (name, maker) in enumerate(makers.items())}
    checked = {name: on_device(batch, device) for name, batch in held_out.items()}
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
        questions.epochs([spec.path.name for spec in files]),
        about=_about(config, shape),
        unit="",
        measured_on=f"Of a held-out prompt's tokens, labels and heads each choose {TOP:.0%}, in every layer and KV "
        f"head: `overlap` is the share of the labels' choice that is the heads' too; chance is {TOP:g}, `recent` the "
        "share that the prompt's last tokens have.",
        tasks=list(makers),
        held_back=0 if valid else sum(map(len, held.values())),
        base=config.target,
        overlaps=overlaps,
        accuracy_curve="overlap.png" if drawn else None,
        throughput=throughput,
    )


def _device(config: RetainingConfig) -> torch.device:
    parse_device(config.device)
    found: torch.device = accelerator(config.device, config.precision).device
    return found


def _most_rows(config: RetainingConfig) -> int:
    """Rows that a run of so many steps can use; a run by the clock is given a thousand steps a minute."""
    steps = config.tokens // config.step_tokens if config.tokens else 1000 * config.minutes
    return int(steps * (config.step_tokens // min(config.row_tokens)))


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


def _hold_back(config: RetainingConfig, path: Path, rows: list[Answered]) -> list[Answered]:
    """Some of a file's prompts, which are no longer trained on.

    Raises:
        InputError: there are too few.
    """
    count = min(config.eval_rows, len(rows) // 10)
    if not count:
        raise InputError(
            f"{path} has {len(rows)} prompts with answers, of which a tenth is to be held back; give ten or more, or "
            "held-out data with --valid NAME=FILE"
        )
    chosen = set(np.random.default_rng((config.seed, len(rows))).choice(len(rows), count, replace=False).tolist())
    held = [rows[index] for index in sorted(chosen)]
    rows[:] = [one for index, one in enumerate(rows) if index not in chosen]
    return held


def _of_task(config: RetainingConfig, key: int, maker: TaskRows, questions: Questions) -> Batch:
    """Held-out rows of a task; they are made before training, so that a length that is too short is found."""
    length = max(config.row_tokens)
    rngs = [np.random.default_rng((config.seed, HELD_OUT, key, i)) for i in range(config.eval_rows)]
    return joined([questions.row(maker.make(rng, questions.length(length)), length) for rng in rngs])


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
