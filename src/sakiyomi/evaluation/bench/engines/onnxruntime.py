"""ONNX Runtime GenAI, with a draft model of its own. Runs in its environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

KINDS = {"float32": "fp32", "int8": "int8", "int4": "int4"}
"""What its model builder writes for a CPU; it has no passes in bfloat16 there."""


def convert(model: str, kind: str, out: str) -> list[str]:
    """The command that converts a checkpoint; see ``worker``."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", model, "-o", out]
    return [*command, "-p", KINDS[kind], "-e", "cpu", "-c", str(Path(out) / "cache")]


def start(task: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], list[list[int]]], dict[str, Any]]:
    """Open a converted model; see ``worker``."""
    import numpy as np
    import onnxruntime
    import onnxruntime_genai as genai

    threads = {"session_options": {"intra_op_num_threads": task["threads"]}}
    change: dict[str, Any] = {"model": {"decoder": threads}}
    if task["draft"] is not None:
        draft = json.loads((Path(task["draft"]) / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
        draft["filename"] = os.path.relpath(Path(task["draft"]) / draft["filename"], task["model"])
        change = {"model": {"decoder": threads, "draft": draft}, "speculative": {"max_draft_tokens": task["gamma"]}}
    config = genai.Config(task["model"])
    config.overlay(json.dumps(change))
    model = genai.Model(config)

    def together(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = genai.GeneratorParams(model)
        length = len(prompts[0]) + tokens
        params.set_search_options(max_length=length, min_length=length, batch_size=len(prompts), do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [[int(token) for token in generator.get_sequence(i)[-tokens:]] for i in range(len(prompts))]

    def write(batch: list[list[int]], tokens: int) -> list[list[int]]:
        if task["draft"] is not None and len(batch) > 1:
            raise ValueError("it drafts for one request at a time")
        found: dict[int, list[int]] = {}
        order = sorted(range(len(batch)), key=lambda i: len(batch[i]))
        for _, group in groupby(order, key=lambda i: len(batch[i])):  # rows of a batch have one length
            same = list(group)
            found |= dict(zip(same, together([batch[i] for i in same], tokens), strict=True))
        return [found[i] for i in range(len(batch))]

    return write, {
        "version": f"{genai.__version__} on onnxruntime {onnxruntime.__version__}",
        "threads": task["threads"],
        "weights": KINDS[task["kind"]],
        "KV": "its default",
    }
