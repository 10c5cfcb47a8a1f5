"""Long prompts on a CPU: seconds to the first token, right answers and memory, beside llama.cpp by turns.

    python benchmarks/long_prompts.py FOLDER --quantize int8 --length 2048 --length 8000 --filler books.jsonl.gz

Prompts are made tasks whose answers are known, as of `sakiyomi bench long`. Ours: the whole cache, and policies with an
eighth of it. llama.cpp: keys and values of 16 and of 8 bits (docs/peers.md says how to install it). Each contender is a
process of its own and reads the same prompts, one after the other, contender by contender; the first prompt of several
warms up. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from sakiyomi.evaluation.bench.engines.gguf_files import KINDS, gguf_file
from sakiyomi.evaluation.bench.engines.process import EngineProcess
from sakiyomi.evaluation.bench.engines.registry import ENGINES, OtherEngine, converted_folder, environments
from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.questions import made, tasks_of
from sakiyomi.kernels.quantization import QUANTIZATIONS
from sakiyomi.model_executor.loading import load_model

CACHES = ["full", "keydiff", "keydiff+minference", "snapkv"]


class Own(OtherEngine):
    """Sakiyomi as an engine of ``worker.py``, in this environment."""

    @property
    def file(self) -> Path:
        return Path(__file__)


def start(task: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Open the model with a cache; see ``worker.py``."""
    from sakiyomi import LLM, SamplingParams

    torch.set_num_threads(task["threads"])
    kind, budget = task["kind"], {} if task["cache"] in ("full", "minference") else {"kv_budget": task["context"] // 8}
    precision = {"quantize": kind} if kind in QUANTIZATIONS else {"dtype": kind}
    llm = LLM(task["model"], "none", cache=task["cache"], max_context=task["context"], **budget, **precision)
    llm.wait()

    def write(batch: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        return [text.token_ids for text in llm.generate(batch, params)]

    return write, {"cache": task["cache"], **budget}


def peak(process: EngineProcess) -> float:
    """The most memory that a process has held, in MiB."""
    lines = Path(f"/proc/{process._process.pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of a model")
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, action="append", help="tokens of a prompt; default 2048 and 8000")
    parser.add_argument("--task", action="append", help="made tasks; default passkey")
    parser.add_argument("--filler", help="texts in which made tasks hide what they ask for")
    parser.add_argument("--cache", action="append", help=f"ours; default {', '.join(CACHES)}")
    parser.add_argument("--count", type=int, default=4, help="prompts of each task and length")
    parser.add_argument("--bits", choices=["16", "8"], action="append", help="of llama.cpp's pairs; default both")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--environments", help="folder of other engines' environments, as of bench --rows peers")
    args = parser.parse_args()
    kind, found = args.quantize or args.dtype, {}
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    config = LongConfig(target=args.target, tasks=tuple(args.task or ["passkey"]), filler=args.filler)
    own = Own("sakiyomi", Path(sys.prefix).name, "", [kind])
    llamacpp = next(engine for engine in ENGINES if engine.key == "llamacpp")
    gguf = str(gguf_file(load_model(args.target, dtype=args.dtype), KINDS[kind])) if args.peers else ""
    for length in args.length or [2048, 8000]:
        questions = [
            made(name, task, 0, length, place, config, tokenizer)
            for name, task in tasks_of(config).items()
            for place in range(args.count)
        ]
        context = max(len(question.tokens) + question.answer_tokens for question in questions) + 8
        task = {"kind": kind, "draft": None, "gamma": 0, "threads": torch.get_num_threads(), "requests": 1}
        task |= {"context": context, "folder": str(converted_folder())}
        with ExitStack() as stack:
            engines: dict[str, EngineProcess] = {}
            for cache in args.cache or CACHES:
                more = task | {"model": args.target, "cache": cache}
                engines[f"sakiyomi {cache}"] = EngineProcess(own, Path(sys.prefix).parent, more)
            for bits in (args.bits or ["16", "8"]) if args.peers else ():
                more = task | {"model": gguf, "cache": bits}
                engines[f"llama.cpp {bits} bits"] = EngineProcess(llamacpp, environments(args.environments), more)
            for engine in engines.values():
                stack.callback(engine.close)
            first: dict[str, list[float]] = {name: [] for name in engines}
            right: dict[str, list[float]] = {name: [] for name in engines}
            for number, question in enumerate(questions):
                for name, engine in engines.items():
                    seconds = engine.run([[list(question.tokens)]], 1).seconds
                    text = engine.run([[list(question.tokens)]], question.answer_tokens).outputs[0]
                    right[name].append(question.score(tokenizer.decode(text)))
                    if number or args.count == 1:
                        first[name].append(seconds)
            print(f"\n{length} tokens, {kind}, load {os.getloadavg()[0]:.1f}")
            for name, engine in engines.items():
                row = {"first": statistics.median(first[name]), "right": statistics.mean(right[name])}
                row |= {"MiB": peak(engine)}
                found[f"{name}, {length}"] = row
                print(f"  {name:<28}{row['first']:8.2f} s  right {row['right']:.2f}  {row['MiB']:6.0f} MiB", flush=True)
    print(json.dumps({"kind": kind, "threads": torch.get_num_threads(), "rows": found}))


if __name__ == "__main__":
    main()
