"""Have a target write the answers that its drafts and heads then learn from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from sakiyomi.core.errors import InputError
from sakiyomi.engine.llm import LLM
from sakiyomi.model_executor.loading.model import parse_device
from sakiyomi.train.commands import TrainDistillData
from sakiyomi.train.counted import read_prompts
from sakiyomi.train.data import Ids, encode_file, parse_texts
from sakiyomi.train.labels import vocabulary
from sakiyomi.train.report import Reporter
from sakiyomi.train.samples import LONGEST_PROMPT, Plan, Samples, Write, by, weights_digest
from sakiyomi.train.taught import load_target
from sakiyomi.train.writing import writing

__all__ = ["train_distill_data"]


def load_writer(config: TrainDistillData) -> tuple[LLM, PreTrainedModel]:
    """The engine that writes, and its model."""
    target, tokenizer = load_target(config.target)
    moved: Any = target
    moved = moved.to(parse_device(config.device))
    return LLM((moved, tokenizer), "none", compile=False, max_batch=config.batch), target


def train_distill_data(
    config: TrainDistillData, command: str = "", writer: Callable[[str], Write] | None = None
) -> dict[str, Any]:
    """Run `sakiyomi train distill-data`.

    Args:
        config: the settings.
        command: not kept: what wrote the file stands in the record beside it.
        writer: makes who writes, from the name of the model's function; by default the engine here does.

    Returns:
        The summary that `--json` prints; `finished` is False after Ctrl-C, and the same command goes on.
    """
    began = time.monotonic()
    specs = parse_texts("--data", config.data)
    llm, target = load_writer(config)
    tokenizer, digest = llm.tokenizer, weights_digest(target)
    room = llm.max_context - config.tokens
    reporter = Reporter(20.0)
    pools: list[list[Ids]] = []
    for spec in specs:
        chats = read_prompts(spec.path, tokenizer)
        fitting = [~np.array(prompt, dtype=np.int64) for prompt in chats if 0 < len(prompt) <= room]
        if len(fitting) < len(chats):
            reporter.note(f"{spec.path.name}: {len(chats) - len(fitting)} prompts of more than {room} tokens left out")
        pools.append(fitting if chats else encode_file(spec.path, tokenizer, vocabulary(target)))
        if not pools[-1] or (not chats and room < LONGEST_PROMPT):
            raise InputError(
                f"tokens is {config.tokens}, and {config.target} has {llm.max_context} positions for them and the "
                f"prompts of {spec.path}; set --tokens lower"
            )
    out = Path(config.out).expanduser()
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    plan = Plan(out, config.samples, config.minutes, config.tokens, config.batch, config.temperatures, config.seed)
    samples = Samples(plan, digest, tokenizer, specs)
    before, finished = samples.count, True
    try:
        samples.extend(by(llm) if writer is None else writer(digest), pools, reporter)
    except KeyboardInterrupt:
        finished = False
    return {
        "finished": finished,
        "out": str(out),
        "samples": samples.count,
        "written": samples.count - before,
        "seconds": time.monotonic() - began,
    }
