"""Prompts that are read in part: seconds until the first token, and the share of pairs whose attention is computed.

    python benchmarks/sparse_prefill.py --target retriever --tokens 4096 --tokens 8000
    python benchmarks/sparse_prefill.py --tokens 8192 --tokens 16384

Without a target a random Llama of 4 layers, 512 wide, 8 heads, reads noise: what it looks at is spread wide, and the
share is a pattern's largest. Laps take turns. Processor seconds are of all threads together, and what other processes
do is not in them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from random_models import random_llama
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.policies.sparse import Chunk, Sparse, attend_some
from sakiyomi.model_executor.attention import torch as dense
from sakiyomi.train.long_tasks import TASKS

CACHES = ("minference", "minference[vertical=100,slash=40]", "minference[pattern=a-shape]", "minference[pattern=auto]")


def share(llm: LLM, tokens: list[int]) -> float:
    """Of the pairs that the rows of a prompt may see, how many are computed, in percent."""
    counts = [0, 0]

    def counted(sparse: Sparse, chunk: Chunk, values: Tensor) -> Tensor:
        for i, seen in enumerate(sparse.seen(chunk)):
            first = chunk.first + i * sparse.block
            seen[:, first:] = True
            rows = seen.shape[1] - first
            counts[0] += rows * int(seen.sum())
            counts[1] += rows * seen.numel()
        return attend_some(sparse, chunk, values)

    dense.attend_some = counted
    try:
        llm.generate([tokens], SamplingParams(max_new_tokens=1))
    finally:
        dense.attend_some = attend_some
    return 100.0 * counts[0] / counts[1]


def seconds(llm: LLM, tokens: list[int]) -> tuple[float, float]:
    """Wall clock and processor seconds."""
    wall, busy = time.perf_counter(), time.process_time()
    llm.generate([tokens], SamplingParams(max_new_tokens=1))
    return time.perf_counter() - wall, time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="an embedded model or a folder; a random Llama without")
    parser.add_argument("--cache", action="append", help="beside full; by default four")
    parser.add_argument("--tokens", type=int, action="append", help="of the prompt; by default 4096")
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--laps", type=int, default=3)
    given = parser.parse_args()
    target = given.target
    tokenizer = LLM(target or "retriever", "none", compile=False).tokenizer
    if target is None:
        model = random_llama(512, 4, 8, 1024, 1024, torch.float32, positions=32768)
        target = model, tokenizer
    caches = ["full", *(given.cache or CACHES)]
    options: dict[str, Any] = {"chunk_size": given.chunk_size, "compile": False, "max_batch": 1}
    llms = {cache: LLM(target, "none", cache=cache, **options) for cache in caches}
    lines = []
    for count in given.tokens or [4096]:
        rng = np.random.default_rng(0)
        if given.target:
            tokens = tokenizer(TASKS["multikey"].make(rng, count, tokenizer).prompt())["input_ids"]
        else:
            tokens = rng.integers(2, 1000, count).tolist()
        shares = {cache: share(llms[cache], tokens) for cache in caches[1:]}
        spent: dict[str, list[tuple[float, float]]] = {cache: [] for cache in caches}
        for _ in range(given.laps):
            for cache, llm in llms.items():
                spent[cache].append(seconds(llm, tokens))
        for cache in caches:
            wall, busy = (statistics.median(column) for column in zip(*spent[cache], strict=True))
            least = min(busy for _, busy in spent[cache])
            line = {
                "tokens": len(tokens),
                "cache": cache,
                "share": round(shares.get(cache, 100.0), 1),
                "seconds": round(wall, 3),
            }
            lines.append(line | {"cpu_seconds": round(busy, 3), "least_cpu_seconds": round(least, 3)})
            print(lines[-1], flush=True)
    about = {"target": given.target or "random Llama", "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps(about | {"chunk_size": given.chunk_size, "laps": given.laps, "prompts": lines}))


if __name__ == "__main__":
    main()
