"""Whether "auto" ever makes text slower than plain decoding: by kind of text, requests at once, format and build.

    python benchmarks/never_slower.py FOLDER --prompts mt_bench_question.jsonl --prompts HumanEval.jsonl.gz
    python benchmarks/never_slower.py FOLDER --prompts FILE --format int8 --build avx2 --build avx512 --requests 1

Run it before each release. Each lap is plain, "auto" and plain again, and "auto" begins with a draft that has seen none
of the texts. *A/A* is how far the two plain ones are apart, in the worst lap; a cell is slow where
"auto" is below 1 by more than that. Times are wall clock with the prompts; `--processor` takes those of the processor,
for a busy machine with OMP_NUM_THREADS=1. Each build of the kernels and each format runs in a process of its own. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from free_drafts import questions
from sakiyomi import LLM, SamplingParams
from sakiyomi.engine.chat_template import Dialogue
from sakiyomi.engine.plain import EngineView
from sakiyomi.kernels.quantization import QUANTIZATIONS

LISTS = [
    f"List {count} {what}, one a line, each with a short reason."
    for count, what in ((12, "animals"), (10, "cities"), (15, "foods"), (8, "books"), (20, "jobs"), (9, "rivers"))
]
"""The kind of text that files of questions lack."""


def measure(args: argparse.Namespace, kind: str, build: str) -> dict[str, Any]:
    """The cells of one build and one format, in this process."""
    if build:
        os.environ["SAKIYOMI_NATIVE"] = build
    llm = LLM(args.target, "none", max_batch=max(args.requests), **_options(kind))
    llm.wait()
    dialogue = Dialogue(llm.tokenizer, "auto", "")
    files = questions(args.prompts, args.count).items()
    asked = {name: [turns[0] for turns in some] for name, some in files if name in (args.kind or [name])}
    params, clock = SamplingParams(max_new_tokens=args.max_new_tokens), [time.perf_counter, time.process_time]
    now, cells = clock[args.processor], {}
    for name, texts in (asked | {"lists": LISTS[: args.count]}).items():
        prompts = [dialogue.read(dialogue.messages_with(text, [])) for text in texts]
        for count in args.requests:
            waiting = [prompts[i % len(prompts)] for i in range(max(count, len(prompts)))]
            outputs: list[list[Any]] = []

            def lap(draft: str, waiting: Any = waiting, count: int = count, outputs: Any = outputs) -> float:
                view, found = EngineView(llm, llm.drafter(draft)), []  # which has seen none of the texts
                began = now()
                for first in range(0, len(waiting), count):
                    found += view.engine.complete(view.submit(waiting[first : first + count], params))
                outputs.append([text.token_ids for text in found])
                return now() - began

            for draft in ("none", "auto"):
                lap(draft)
            laps = [(lap("none"), lap("auto"), lap("none")) for _ in range(args.laps)]
            same = sum(text == plain for each in outputs for text, plain in zip(each, outputs[0], strict=True))
            cells[f"{name}, {count} at once"] = {
                "speed": statistics.median((a + b) / (2 * own) for a, own, b in laps),
                "apart": max(abs(a / b - 1) for a, _, b in laps),
                "texts equal": [same, sum(map(len, outputs))],
            }
            print(kind, name, count, cells[f"{name}, {count} at once"], os.getloadavg()[0], file=sys.stderr, flush=True)
    return cells


def _options(kind: str) -> dict[str, Any]:
    return {"quantize": kind} if kind in QUANTIZATIONS else {"dtype": kind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of a chat model")
    parser.add_argument("--prompts", action="append", required=True, help="files of questions; each kind is a row")
    parser.add_argument("--kind", action="append", help="of the files' questions; default all")
    parser.add_argument("--format", action="append", help="bfloat16, int8, int4, ...; default bfloat16 and int8")
    parser.add_argument("--build", action="append", help="builds of the kernels; default: the best one here")
    parser.add_argument("--requests", type=int, action="append", help="at once; default 1, 8 and 32")
    parser.add_argument("--count", type=int, default=6, help="texts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--processor", action="store_true", help="times of the processor")
    args = parser.parse_args()
    args.requests = args.requests or [1, 8, 32]
    found: dict[str, Any] = {}
    for build, kind in itertools.product(args.build or [""], args.format or ["bfloat16", "int8"]):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            cells = apart.submit(measure, args, kind, build).result()
        found |= {f"{build or 'best'} {kind}, {name}": cell for name, cell in cells.items()}
    slow = {name for name, cell in found.items() if cell["speed"] < 1 - cell["apart"]}
    for name, cell in found.items():
        mark = "  SLOWER" if name in slow else ""
        equal, of = cell["texts equal"]
        print(f"{name:<44}{cell['speed']:6.2f}x  A/A {cell['apart']:.1%}  texts equal {equal}/{of}{mark}")
    print(f"{len(found) - len(slow)} of {len(found)} cells are not slower beyond A/A; load {os.getloadavg()[0]:.1f}")
    print(json.dumps({"cells": found, "load": os.getloadavg(), "threads": os.environ.get("OMP_NUM_THREADS")}))


if __name__ == "__main__":
    main()
