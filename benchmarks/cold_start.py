"""What a newcomer waits for: a command from the start of its process to its first character, its last one and its end.

    python benchmarks/cold_start.py                                    # tales, 200 tokens, three laps
    python benchmarks/cold_start.py tales 134M 500M --models FOLDER    # and made larger, with the draft of tales
    python benchmarks/cold_start.py FOLDER --draft model:FOLDER --quantize int8

Contenders go in turn, a process of their own each: `sakiyomi generate` with what earlier runs left in its cache folder,
the same on an empty one (where no wheel brought the kernels, they are compiled), the same without tracing, a script of
ten lines with transformers, and one with llama.cpp where row `peers` of `sakiyomi bench` finds it (`--environments`).
Greedy, the same prompt and number of tokens; texts end where the model ends them, unless `--ignore-eos` is given.
Medians; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sakiyomi
from sakiyomi.core.embedded import embedded, is_embedded_name
from sakiyomi.core.errors import UnsupportedError

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
import xllamacpp
file, prompt, tokens, ignore, threads = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.verbosity = file, 1024, -1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
server = xllamacpp.Server(params)
asked = {"prompt": prompt, "max_tokens": int(tokens), "temperature": 0, "stream": True, "ignore_eos": bool(ignore)}
def show(parts):
    for part in parts if isinstance(parts, list) else [parts]:
        print(*[choice.get("text", "") for choice in part.get("choices", ())], end="", flush=True)
server.handle_completions(asked, show)
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


def llama_command(folder: str, environments_folder: str | None) -> list[str] | None:
    """What runs the target by llama.cpp; None where it is not installed."""
    from sakiyomi.evaluation.bench.engines.process import python_of
    from sakiyomi.evaluation.bench.engines.registry import ENGINES, environments
    from sakiyomi.model_executor.loading import load_model

    engine = next(engine for engine in ENGINES if engine.key == "llamacpp")
    try:
        python = python_of(engine, environments(environments_folder))
        return [str(python), "-I", "-c", LLAMA, str(engine.checkpoint(load_model(folder), "bfloat16"))]
    except UnsupportedError as error:
        print(f"llama.cpp is left out: {error}", file=sys.stderr)
        return None


def made(size: str, models: str) -> str:
    """The folder of tales at a size such as 134M; written if it is not there yet."""
    from inflate import InflateConfig, inflate

    place = Path(models) / f"tales-{size}"
    if not place.exists():
        inflate(InflateConfig(out=str(place), params=size), lambda text: print(f"{size}: {text}", file=sys.stderr))
    return str(place)


def measured(target: str, draft: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of each contender with one target, by what is timed."""
    folder = str(embedded(target)) if is_embedded_name(target) else target
    ours = [sys.executable, "-W", "ignore", "-m", "sakiyomi", "generate", args.prompt, "--target", target]
    ours += ["--draft", draft, "--max-new-tokens", str(args.tokens)]
    ours += (["--quantize", args.quantize] if args.quantize else []) + (["--ignore-eos"] if args.ignore_eos else [])
    source = os.pathsep.join([str(Path(sakiyomi.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": source, "TRANSFORMERS_VERBOSITY": "error"}
    theirs = [args.prompt, str(args.tokens), "1" if args.ignore_eos else ""]
    contenders: dict[str, list[str]] = {
        "sakiyomi": ours,
        "sakiyomi, empty cache": ours,
        "sakiyomi, no traces": [*ours, "--compile", "false"],
        "transformers": [sys.executable, "-W", "ignore", "-c", TRANSFORMERS, folder, *theirs],
    }
    if (command := llama_command(folder, args.environments)) is not None:
        contenders["llama.cpp"] = [*command, *theirs, str(os.cpu_count())]
    with tempfile.TemporaryDirectory() as place:
        timed(ours, environment)  # what a first run leaves behind, and the disk's own cache
        found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for lap in range(args.laps):
            for name, command in contenders.items():
                with tempfile.TemporaryDirectory(dir=place) as empty:
                    own = {"SAKIYOMI_CACHE_DIR": empty} if "empty" in name else {}
                    found[name].append(timed(command, environment | own))
            print(f"{target}: lap {lap + 1} of {args.laps}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return {
        name: {what: statistics.median(time[what] for time in times) for what in times[0]}
        for name, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["tales"], help="names, folders, or sizes such as 134M")
    parser.add_argument("--draft", default="auto", help="of targets that are no size")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--ignore-eos", action="store_true", help="all of the tokens, whatever the model says")
    parser.add_argument("--models", help="where sizes are made and kept; by default a temporary folder")
    parser.add_argument("--environments", help="as of sakiyomi bench")
    args = parser.parse_args()
    everything = {}
    with tempfile.TemporaryDirectory() as temporary:
        for target in args.targets:
            if re.fullmatch(r"[\d.]+[MB]", target):
                found = measured(made(target, args.models or temporary), "model:tales-draft", args)
            else:
                found = measured(target, args.draft, args)
            everything[target] = found
            print(f"{target + ', seconds to':<24}{'first':>8}{'last':>8}{'end':>8}")
            for name, times in found.items():
                print(f"{name:<24}{times['first']:8.2f}{times['last']:8.2f}{times['whole']:8.2f}")
    print(json.dumps({"tokens": args.tokens, "laps": args.laps, "targets": everything}))


if __name__ == "__main__":
    main()
