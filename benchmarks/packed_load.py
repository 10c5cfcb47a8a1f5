"""A random Llama of 1.16 G weights in shards, rounded while it is read, then loaded from its packed copy.

Each load is a process of its own, so that its peak is its own; what Python, torch and transformers take is shown apart.

    python benchmarks/packed_load.py --quantize int8

Takes 4 GB of disk for a minute or two. The last line is one JSON object: seconds and megabytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import sakiyomi
from sakiyomi.core.memory import peak_bytes
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.models import random_llama

SHAPE = (2048, 22, 32, 5632, 32000)


def make(folder: Path) -> None:
    """Write the checkpoint, with a tokenizer that nobody uses."""
    random_llama(*SHAPE, torch.bfloat16).save_pretrained(folder, max_shard_size="400MB")
    for file in sakiyomi.embedded("tales").glob("tokenizer*"):
        shutil.copy(file, folder)


def load(folder: str, quantize: str) -> dict[str, float]:
    """Load in this process."""
    libraries, began = peak_bytes(), time.perf_counter()
    LLM(folder, "none", quantize=quantize, compile=False)
    return {"seconds": time.perf_counter() - began, "libraries_mb": libraries / 1e6, "peak_mb": peak_bytes() / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", choices=("int8", "int4"), default="int8")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS, metavar=("NAME", "FOLDER"))
    given = parser.parse_args()
    if given.step:
        step, folder = given.step
        print(json.dumps(make(Path(folder)) if step == "make" else load(folder, given.quantize)))
        return
    with tempfile.TemporaryDirectory() as folder:

        def run(step: str) -> dict[str, float]:
            command = [sys.executable, __file__, "--quantize", given.quantize, "--step", step, folder]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            found: dict[str, float] = json.loads(output.stdout.splitlines()[-1])
            return found

        run("make")
        found = {"first": run("first"), "copy": run("copy")}
        packed = sum(path.stat().st_size for path in Path(folder).glob("sakiyomi-*/*.safetensors")) / 1e6
    for name, line in found.items():
        own = line["peak_mb"] - line["libraries_mb"]
        print(f"{name}: {line['seconds']:.1f} s, peak {line['peak_mb']:.0f} MB, {own:.0f} of them for the model")
    print(json.dumps({"quantize": given.quantize, "packed_mb": packed, **found}))


if __name__ == "__main__":
    main()
