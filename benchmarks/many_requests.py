"""Servers under many chats: tokens/s and first tokens, closed loops and Poisson arrivals, beside other engines.

    python benchmarks/many_requests.py FOLDER --quantize int8 --questions FILE --peer llamacpp --peer openvino
    python benchmarks/many_requests.py FOLDER --questions FILE --streams 32 --arrivals .7 --peer llamacpp

Each request is a question in the model's chat template, of 50 to 2000 tokens, and asks for 32 to 128 tokens; end tokens
are ignored, so that all servers do the same work. `--streams N`: N clients, each with one request after the other.
`--arrivals S`: requests come at random, S times as many a second as the slowest server finished in the largest closed
loop (which is run first). Servers are processes of their own and have this machine by turns, lap by lap; before
the first one eight requests warm up. Other engines need environments (docs/peers.md). `--write FILE` writes requests as
JSON lines for another client, such as guidellm. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import transformers

from free_drafts import questions
from sakiyomi.evaluation.bench.engines.gguf_files import KINDS, gguf_file
from sakiyomi.evaluation.bench.engines.process import WORKER
from sakiyomi.evaluation.bench.engines.registry import ENGINES, OtherEngine, converted_folder
from sakiyomi.evaluation.bench.engines.vllm import settings
from sakiyomi.model_executor.loading import load_model
from server import exchange, peer_python, processor, server, vllm_serve

SHORTEST, LONGEST, TOKENS, CONTEXT = 50, 2000, (32, 128), 2304
MARK, MODEL = "@lap@", "model"


@dataclass(frozen=True)
class Asked:
    """A request: its text, and how many tokens it wants. No two laps have the same text: nothing can be used again."""

    prompt: str
    tokens: int

    def again(self, lap: int) -> Asked:
        """The same for another lap: the beginning of the question differs."""
        return Asked(self.prompt.replace(MARK, f"{lap}", 1), self.tokens)


@dataclass(frozen=True)
class Load:
    """A closed loop of so many streams, or arrivals at this share of the slowest server's speed."""

    name: str
    streams: int = 0
    share: float = 0.0


@dataclass(frozen=True)
class Reply:
    """When its first and last token came, in seconds after it was sent, and how many tokens."""

    first: float
    last: float
    tokens: int


def chats(folder: str, files: Sequence[str], count: int) -> list[Asked]:
    """So many questions of the files in the model's template, of all lengths, in an order of chance."""
    tokenizer, found = transformers.AutoTokenizer.from_pretrained(folder), []
    for turns in itertools.chain.from_iterable(questions(files, sys.maxsize).values()):
        said = [{"role": "user", "content": f"{MARK}. {turns[0]}"}]
        text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        size = len(tokenizer(text).input_ids)
        if SHORTEST <= size <= LONGEST:
            found.append((size, text))
    chance = random.Random(0)
    found = sorted(found)[:: max(1, len(found) // count)][:count]
    chance.shuffle(found)
    return [Asked(text, chance.randint(*TOKENS)) for _, text in found]


async def ask(url: str, asked: Asked) -> Reply:
    """Send one request and read its stream."""
    body = {"model": MODEL, "prompt": asked.prompt, "max_tokens": asked.tokens, "temperature": 0, "stream": True}
    parts, began = await exchange(url, body | {"ignore_eos": True})
    times = [when - began for when, part in parts if b'"choices"' in part]
    if not times:
        said = b"".join(part for _, part in parts)
        raise SystemExit(f"no tokens came from {url}: {said[-500:].decode(errors='replace')}")
    return Reply(times[0], times[-1], asked.tokens)


async def closed(url: str, asked: Sequence[Asked], streams: int) -> list[Reply]:
    """All requests, so many at once."""
    waiting, replies = iter(asked), []

    async def client() -> None:
        for each in waiting:
            replies.append(await ask(url, each))

    await asyncio.gather(*(client() for _ in range(streams)))
    return replies


async def arrivals(url: str, asked: Sequence[Asked], rate: float) -> list[Reply]:
    """All requests, which come at random: so many a second."""
    chance, running = random.Random(1), []
    for each in asked:
        running.append(asyncio.create_task(ask(url, each)))
        await asyncio.sleep(chance.expovariate(rate))
    return list(await asyncio.gather(*running))


def as_openvino(engine: OtherEngine, python: Path, target: str, kind: str) -> str:
    """The folder of the model as OpenVINO reads it, written once."""
    code = "import runpy, sys; w, e = map(runpy.run_path, sys.argv[1:3]); "
    code += "print(w['converted'](e['convert'], *sys.argv[3:]))"
    given = str(WORKER), str(engine.file), target, kind, str(converted_folder())
    done = subprocess.run([str(python), "-c", code, *given], check=True, capture_output=True, encoding="utf-8")
    return done.stdout.split()[-1]


def commands(args: argparse.Namespace, kind: str, most: int) -> dict[str, tuple[list[str], dict[str, str] | None]]:
    """By name of the server the command that starts it, and its environment."""
    run = [sys.executable, "-W", "ignore", "-c", "from sakiyomi.cli import main; main()", "serve"]
    mine = [*run, "--target", args.target, "--max-batch", str(most), "--max-context", str(CONTEXT)]
    mine += ["--served-name", MODEL, "--max-queue", "1000"]
    mine += ["--quantize", args.quantize] if args.quantize else ["--dtype", args.dtype]
    found: dict[str, tuple[list[str], dict[str, str] | None]] = {
        f"sakiyomi {name}": ([*mine, "--draft", draft], None) for name, draft in (("plain", "none"), ("auto", "auto"))
    }
    task = {"kind": kind, "draft": None, "gamma": 0, "requests": most, "context": CONTEXT}
    task |= {"threads": torch.get_num_threads()}
    for engine in (each for each in ENGINES if each.key in args.peer):
        if kind not in engine.kinds:
            raise SystemExit(f"{engine.name} has no {kind}: leave --peer {engine.key} out")
        if engine.key == "vllm":
            command = vllm_serve(args.target, kind, most, args.environments, CONTEXT, MODEL)
            found[engine.name] = command, settings(torch.get_num_threads()) | {"PYTHONPATH": ""}
            continue
        python = peer_python(engine, args.environments)
        if engine.key == "llamacpp":
            model = str(gguf_file(load_model(args.target, dtype=args.dtype), KINDS[kind]))
        else:
            model = as_openvino(engine, python, args.target, kind)
        file = str(Path(__file__).with_name("peer_servers.py"))
        given = [str(engine.file), json.dumps(task | {"model": model})]
        found[engine.name] = ([str(python), file, *given], dict(os.environ, PYTHONPATH=""))
    return found


def lap(served: tuple[str, psutil.Process], load: Load, asked: Sequence[Asked], rate: float) -> dict[str, float]:
    """Figures of a load on one server: tokens/s, first tokens and gaps between tokens in ms."""
    url, process = served
    before, began = processor(process), time.perf_counter()
    work = closed(url, asked, load.streams) if load.streams else arrivals(url, asked, rate)
    replies = asyncio.run(work)
    seconds, tokens = time.perf_counter() - began, sum(reply.tokens for reply in replies)
    firsts = sorted(1000 * reply.first for reply in replies)
    gaps = sorted(1000 * (reply.last - reply.first) / (reply.tokens - 1) for reply in replies)
    return {
        "tokens/s": tokens / seconds, "tokens per processor second": tokens / (processor(process) - before),
        "requests/s": len(replies) / seconds, "first p50": statistics.median(firsts),
        "first p95": firsts[int(0.95 * (len(firsts) - 1))], "gap p50": statistics.median(gaps),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of a chat model")
    parser.add_argument("--questions", action="append", required=True, help="files of questions with `turns`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--streams", type=int, action="append", help="closed loops (again for each); default 8 and 32")
    parser.add_argument("--arrivals", type=float, action="append", help="shares of the slowest server's requests/s")
    parser.add_argument("--requests", type=int, default=64, help="of a lap")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], choices=["llamacpp", "openvino", "vllm"])
    parser.add_argument("--environments", help="folder of other engines' environments, as of bench --rows peers")
    parser.add_argument("--write", type=Path, help="write the requests to a file, and measure nothing")
    args = parser.parse_args()
    loads = [Load(f"{n} at once", streams=n) for n in args.streams or (8, 32)]
    loads += [Load(f"arrivals {share:g}", share=share) for share in args.arrivals or ()]
    most, kind = max(load.streams for load in loads), args.quantize or args.dtype
    asked = chats(args.target, args.questions, args.requests)
    if args.write is not None:
        lines = [json.dumps({"prompt": each.again(0).prompt, "output_tokens_count": each.tokens}) for each in asked]
        args.write.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    begun = 0
    with ExitStack() as stack:
        served = {
            name: stack.enter_context(server(command, "/health", env=env))
            for name, (command, env) in commands(args, kind, most).items()
        }
        for load in loads:
            known = [_medians(laps)["requests/s"] for laps in found.get(f"{most} at once", {}).values()]
            rate = load.share * min(known, default=0.0)
            for number in range(args.laps + 1):
                begun += 1
                texts = [each.again(begun) for each in (asked if number else asked[:8])]
                for name, each in served.items():
                    figures = lap(each, load, texts, rate)
                    if number:
                        found.setdefault(load.name, {}).setdefault(name, []).append(figures)
            more = f", {rate:.2f} requests/s" if rate else ""
            print(f"\n{load.name}{more}, {kind}, load of the machine {os.getloadavg()[0]:.1f}")
            for name, laps in found[load.name].items():
                shown = ", ".join(f"{key} {value:.4g}" for key, value in _medians(laps).items())
                print(f"  {name:<16}{shown}", flush=True)
    conditions = {"kind": kind, "requests": len(asked), "threads": torch.get_num_threads(), "laps": args.laps}
    print(json.dumps({"conditions": conditions, "laps": found}))


def _medians(laps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in laps) for key in laps[0]}


if __name__ == "__main__":
    main()
