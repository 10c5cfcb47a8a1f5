"""A random checkpoint in shards, rounded while it is read and recorded, then loaded from its packed copy, and how fast
that runs.

Each load is a process of its own, so that its peak is its own; what Python, torch and transformers take is shown apart.
Speeds are those of the copy: decoding as a share of what the memory gives, passes of 8 rows against those of 1, and a
prompt of 1000 tokens.

    python benchmarks/packed_load.py --quantize int8                     # a Llama of 1.16 G weights: 4 GB of disk
    python benchmarks/packed_load.py --shape qwen3-4b --quantize int8    # as Qwen3-4B: 13 GB of disk, 6 of memory

The last line is one JSON object: seconds, megabytes, tokens a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import sakiyomi
from own_rows.passes import pass_times
from random_models import random_prompts
from sakiyomi import SamplingParams
from sakiyomi.core.memory import peak_bytes
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.machine import bandwidth
from sakiyomi.evaluation.bench.frame import run_ours
from sakiyomi.kernels.batch import SequenceRows

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1.2b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
}
SHARD = 400_000_000
"""Bytes, as far as one tensor is not larger."""
CACHED, PROMPT, LAPS = 128, 1000, 5


def make(shape: str, folder: Path) -> None:
    """Write the checkpoint, a shard at a time, with a tokenizer that nobody uses."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {"max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(**SHAPES[shape], **values, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, str] = {}

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        places.update(dict.fromkeys(shards[0], name))
        save_file(shards[0], folder / name, metadata={"format": "pt"})
        shards[0] = {}

    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        made = torch.ones(tensor.shape, dtype=torch.bfloat16)
        shards[0][name] = made if tensor.dim() == 1 else made.uniform_(-0.035, 0.035, generator=generator)
        if sum(part.nbytes for part in shards[0].values()) > SHARD:
            write()
    write()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8"
    )
    config.save_pretrained(folder)
    for file in sakiyomi.embedded("tales").glob("tokenizer*"):
        shutil.copy(file, folder)


def load(folder: str, quantize: str) -> tuple[LLM, dict[str, float]]:
    """Load in this process."""
    libraries, began = peak_bytes(), time.perf_counter()
    llm = LLM(folder, "none", quantize=quantize)
    seconds = time.perf_counter() - began
    return llm, {"seconds": seconds, "libraries_mb": libraries / 1e6, "peak_mb": peak_bytes() / 1e6}


def speeds(llm: LLM) -> dict[str, float]:
    """Of what was loaded, after a lap that warms up."""
    llm.wait()
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    short, long = (random_prompts(1, length, 4000) for length in (64, PROMPT))
    run_ours(llm, short, params)
    reads = max(bandwidth() for _ in range(3))
    decoding = run_ours(llm, short, params)
    slot = llm.target.cache.take()
    llm.target.cache.reserve(slot, CACHED + 8)
    passes = {rows: (llm.target, [SequenceRows(slot, CACHED, [5] * rows)]) for rows in (1, 8)}
    seconds = pass_times(passes, LAPS, lambda lap: None)
    one, eight = (statistics.median(seconds[rows]) for rows in (1, 8))
    first = SamplingParams(max_new_tokens=1, ignore_eos=True)
    prompt = min(run_ours(llm, long, first).seconds for _ in range(2))
    weights = llm.target.weights.bytes or 0
    return {
        "tokens_per_second": decoding.tokens / decoding.seconds,
        "bandwidth_share": (weights + llm.target.cache.held_bytes(slot, CACHED)) / one / reads,
        "read_gb_per_second": reads / 1e9,
        "pass_ms": 1000 * one,
        "ratio_8_to_1": eight / one,
        "prompt_tokens_per_second": PROMPT / prompt,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-1.2b")
    parser.add_argument("--quantize", choices=("int8", "int4"), default="int8")
    parser.add_argument("--folder", help="where the checkpoint is made, or is already; by default a temporary one")
    parser.add_argument("--step", choices=("make", "first", "copy"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step == "make":
        make(given.shape, Path(given.folder))
        print("{}")
        return
    if given.step:
        llm, found = load(given.folder, given.quantize)
        if given.step == "first":  # as the commands do behind their first text
            began = time.perf_counter()
            llm.record()
            found["recording_seconds"] = time.perf_counter() - began
        print(json.dumps(found | (speeds(llm) if given.step == "copy" else {})))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)

        def run(step: str) -> dict[str, float]:
            command = [sys.executable, __file__, "--shape", given.shape, "--quantize", given.quantize]
            output = subprocess.run(
                [*command, "--step", step, "--folder", str(folder)],
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
            found: dict[str, float] = json.loads(output.stdout.splitlines()[-1])
            return found

        if not (folder / "config.json").exists():
            run("make")
        found = {"first": run("first"), "copy": run("copy")}
        packed = sum(path.stat().st_size for path in folder.glob("sakiyomi-*/*.safetensors")) / 1e6
    for name, line in found.items():
        own = line["peak_mb"] - line["libraries_mb"]
        print(f"{name}: {line['seconds']:.1f} s, peak {line['peak_mb']:.0f} MB, {own:.0f} of them for the model")
    copy = found["copy"]
    print(
        f"{copy['tokens_per_second']:.2f} tokens/s, a pass {copy['pass_ms']:.0f} ms: {copy['bandwidth_share']:.0%} of "
        f"{copy['read_gb_per_second']:.1f} GB/s; 8 rows against 1: {copy['ratio_8_to_1']:.2f}x; a prompt of {PROMPT} "
        f"tokens: {copy['prompt_tokens_per_second']:.0f} tokens/s"
    )
    print(json.dumps({"shape": given.shape, "quantize": given.quantize, "packed_mb": packed, **found}))


if __name__ == "__main__":
    main()
