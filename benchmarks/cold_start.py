"""What a newcomer waits for: a command from the start of its process to its first character, its last one and its end.

    python benchmarks/cold_start.py                                    # tales, 200 tokens, three laps
    python benchmarks/cold_start.py --target FOLDER --draft model:FOLDER --quantize int8

Contenders go in turn, a process of their own each: `sakiyomi generate` with what earlier runs left in its cache folder,
the same on an empty one (kernels are compiled), the same without tracing, a script of ten lines with transformers, and
one with llama.cpp where `pip install 'sakiyomi[bench]'` has been run. Greedy, the same prompt and number of tokens;
texts end where the model ends them, unless `--ignore-eos` is given (then without llama.cpp). Medians; the last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sakiyomi
from sakiyomi.core.embedded import embedded, is_embedded_name

TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
target, prompt, tokens, ignore = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
inputs = tokenizer(prompt, return_tensors="pt")
least = {"min_new_tokens": int(tokens)} if ignore else {}
streamer = TextStreamer(tokenizer, skip_prompt=True)
model.generate(**inputs, max_new_tokens=int(tokens), do_sample=False, streamer=streamer, **least)
"""
LLAMA = """
import sys
from llama_cpp import Llama
file, prompt, tokens = sys.argv[1:]
llama = Llama(file, n_ctx=2048, verbose=False)
for part in llama.create_completion(prompt, max_tokens=int(tokens), temperature=0, stream=True):
    print(part["choices"][0]["text"], end="", flush=True)
"""


def timed(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds from the start of a process to the first and the last byte that it prints, and to its end."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, bufsize=0
    )
    assert process.stdout is not None and process.stderr is not None
    first = last = 0.0
    size = 0
    while part := process.stdout.read(65536):
        last = time.perf_counter() - began
        first = first or last
        size += len(part)
    said = process.stderr.read()
    if process.wait() or not size:
        raise SystemExit(f"{' '.join(command)[:300]} failed:\n{said.decode()[-2000:]}")
    return {"first": first, "last": last, "whole": time.perf_counter() - began, "bytes": size}


def llama_file(target: str) -> Path | None:
    """The target for llama.cpp; None where it is not installed."""
    from sakiyomi.evaluation.bench.llamacpp import gguf_file, missing
    from sakiyomi.model_executor.loading import load_model

    return None if missing() else gguf_file(load_model(target), "BF16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tales")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--ignore-eos", action="store_true", help="all of the tokens, whatever the model says")
    args = parser.parse_args()
    folder = str(embedded(args.target)) if is_embedded_name(args.target) else args.target
    ours = [sys.executable, "-W", "ignore", "-m", "sakiyomi", "generate", args.prompt, "--target", args.target]
    ours += ["--draft", args.draft, "--max-new-tokens", str(args.tokens)]
    ours += (["--quantize", args.quantize] if args.quantize else []) + (["--ignore-eos"] if args.ignore_eos else [])
    source = os.pathsep.join([str(Path(sakiyomi.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": source, "TRANSFORMERS_VERBOSITY": "error"}
    script = [sys.executable, "-W", "ignore", "-c"]
    ignore = "1" if args.ignore_eos else ""
    contenders: dict[str, list[str]] = {
        "sakiyomi": ours,
        "sakiyomi, empty cache": ours,
        "sakiyomi, no traces": [*ours, "--compile", "false"],
        "transformers": [*script, TRANSFORMERS, folder, args.prompt, str(args.tokens), ignore],
    }
    if not args.ignore_eos and (file := llama_file(folder)) is not None:
        contenders["llama.cpp"] = [sys.executable, "-c", LLAMA, str(file), args.prompt, str(args.tokens)]
    with tempfile.TemporaryDirectory() as place:
        timed(ours, environment)  # what a first run leaves behind, and the disk's own cache
        found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for lap in range(args.laps):
            for name, command in contenders.items():
                with tempfile.TemporaryDirectory(dir=place) as empty:
                    own = {"SAKIYOMI_CACHE_DIR": empty} if "empty" in name else {}
                    found[name].append(timed(command, environment | own))
            print(f"lap {lap + 1} of {args.laps}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    middle: dict[str, Any] = {
        name: {what: statistics.median(time[what] for time in times) for what in times[0]}
        for name, times in found.items()
    }
    print(f"{'seconds':<24}{'first':>8}{'last':>8}{'whole':>8}")
    for name, times in middle.items():
        print(f"{name:<24}{times['first']:8.2f}{times['last']:8.2f}{times['whole']:8.2f}")
    print(json.dumps({"target": args.target, "tokens": args.tokens, "laps": args.laps, **middle}))


if __name__ == "__main__":
    main()
