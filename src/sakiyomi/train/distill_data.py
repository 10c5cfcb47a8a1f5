"""Have a target write the answers that its drafts and heads then learn from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from sakiyomi.engine.llm import LLM
from sakiyomi.model_executor.loading.model import parse_device
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.commands import TrainDistillData
from sakiyomi.train.counted import Library
from sakiyomi.train.data import parse_texts
from sakiyomi.train.hidden import vocabulary
from sakiyomi.train.progress import Reporter
from sakiyomi.train.samples import Plan, Samples, Write, by, weights_digest
from sakiyomi.train.taught import load_target


def load_writer(config: TrainDistillData) -> tuple[LLM, PreTrainedModel]:
    """The engine that writes, and its model."""
    target, tokenizer = load_target(config.target, device=parse_device(config.device))
    return LLM((target, tokenizer), "none", compile=False, max_batch=config.batch), target


def train_distill_data(
    config: TrainDistillData, command: str = "", writer: Callable[[str], Write] | None = None
) -> dict[str, Any]:
    """Run `sakiyomi train distill-data`.

    Args:
        config: the settings.
        command: not kept: what wrote the file stands in the record beside it.
        writer: makes the function that writes, from the name of the model's function; by default the engine here does.

    Returns:
        The summary that `--json` prints; `finished` is False after Ctrl-C, and the same command continues.
    """
    began = time.monotonic()
    specs = parse_texts("--data", config.data)
    llm, target = load_writer(config)
    tokenizer, digest, reporter = llm.tokenizer, weights_digest(target), Reporter(20.0)
    library, room = Library(tokenizer, vocabulary(target)), llm.max_context - config.tokens
    pools = [library.prompts(spec.path, room, "--tokens", reporter.note) for spec in specs]
    out = Path(config.out).expanduser()
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    plan = Plan(out, config.samples, config.minutes, config.tokens, config.batch, config.temperatures, config.seed)
    samples = Samples(plan, digest, tokenizer, specs)
    before, finished = samples.count, True
    try:
        samples.extend(by(llm) if writer is None else writer(digest), pools, reporter.note)
    except KeyboardInterrupt:
        finished = False
    return {
        "finished": finished,
        "out": str(out),
        "samples": samples.count,
        "written": samples.count - before,
        "seconds": time.monotonic() - began,
    }
