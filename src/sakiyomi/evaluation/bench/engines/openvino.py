"""OpenVINO GenAI: its continuous batching, with a draft model of its own. Runs in its environment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GROUP = 64
"""Weights of 4 bits that share a scale."""
WEIGHTS = {"float32": ["fp32"], "bfloat16": ["fp16"], "int8": ["int8"]}
WEIGHTS |= {"int4": ["int4", "--sym", "--ratio", "1.0", "--group-size", str(GROUP)]}
"""What optimum-intel writes; of bfloat16 weights fp16 loses nothing that is not below its smallest numbers."""


def convert(model: str, kind: str, out: str) -> list[str]:
    """The command that converts a checkpoint; see ``worker``."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", model]
    return [*command, "--task", "text-generation-with-past", "--weight-format", *WEIGHTS[kind], out]


def precision_of(task: dict[str, Any]) -> str:
    """What it computes in."""
    return "f32" if task["kind"] == "float32" else "bf16"


def opened(task: dict[str, Any]) -> Any:
    """The pipeline of a converted model; see ``worker``."""
    import openvino_genai as genai

    properties = {
        "INFERENCE_NUM_THREADS": task["threads"],
        "INFERENCE_PRECISION_HINT": precision_of(task),
        "PERFORMANCE_HINT": "LATENCY",
    }
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = task["requests"]
    # The prompts of all requests in one pass.
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 2  # gigabytes, far more than the texts of a benchmark need
    more = {} if task["draft"] is None else {"draft_model": genai.draft_model(task["draft"], "CPU", **properties)}
    return genai.ContinuousBatchingPipeline(task["model"], scheduler, "CPU", properties | more)


def start(task: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], list[list[int]]], dict[str, Any]]:
    """Open a converted model; see ``worker``."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    pipeline = opened(task)

    def write(batch: list[list[int]], tokens: int) -> list[list[int]]:
        config = genai.GenerationConfig(max_new_tokens=tokens, do_sample=False, ignore_eos=True)
        if task["draft"] is not None:
            config.num_assistant_tokens = task["gamma"]
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in batch]
        return [list(found.m_generation_ids[0]) for found in pipeline.generate(inputs, [config] * len(batch))]

    return write, {
        "version": genai.__version__,
        "threads": task["threads"],
        "computes in": precision_of(task),
        "weights": " ".join(WEIGHTS[task["kind"]]),
        "KV": "its default",
    }
