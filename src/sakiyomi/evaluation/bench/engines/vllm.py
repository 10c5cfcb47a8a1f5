"""vLLM for the CPU, in this process, with a draft model of its own. Runs in its environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

GIGABYTES = 1
"""Of keys and values; far more than the texts of a benchmark need."""


def settings(threads: int) -> dict[str, str]:
    """Of its environment: by default a processor is set aside for a server's front end."""
    return {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(GIGABYTES),
        "VLLM_NO_USAGE_STATS": "1",
    }


def start(task: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], list[list[int]]], dict[str, Any]]:
    """Open a checkpoint; see ``worker``."""
    os.environ |= settings(task["threads"]) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # no process of its own
    import vllm

    drafts = {"method": "draft_model", "model": task["draft"], "num_speculative_tokens": task["gamma"]}
    llm = vllm.LLM(
        task["model"],
        dtype=task["kind"],
        max_model_len=task["context"],
        max_num_seqs=task["requests"],
        enable_prefix_caching=False,
        speculative_config=None if task["draft"] is None else drafts,
    )

    def write(batch: list[list[int]], tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in batch]
        return [list(found.outputs[0].token_ids) for found in llm.generate(prompts, params, use_tqdm=False)]

    return write, {
        "version": vllm.__version__,
        "threads": task["threads"],
        "weights and KV": task["kind"],
        "passes": "compiled" if not llm.llm_engine.vllm_config.model_config.enforce_eager else "eager",
    }
