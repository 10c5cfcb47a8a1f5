"""Clients of all kinds against one server for as long as it is told to: texts must be right, and memory stay flat.

    python benchmarks/server_soak.py                                    # 1000 requests
    python benchmarks/server_soak.py --seconds 600 --dropped 0.1 --malformed 0.05 --clients 24

The server is a process of its own, with ``--exact``; every reply that is not cut off is compared with the library's
text, in the same process as the clients, which has loaded the model once more. A share of clients goes away in the
middle, a share sends what is no request. Memory is the server's resident one: the mean of the last fifth of the
readings against that of the second fifth. Before the first one every place of the cache is filled once with a long
text: its pages become resident when they are first written to. The last line is one JSON object; the exit
code is 1 if a reply was wrong or lost, or memory grew by more than ``--grow``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from sakiyomi import LLM, SamplingParams

BEGINNINGS = [
    "Once upon a time",
    "The fox went to the river",
    "One day a girl named Lily",
    "むかしむかし",
    '"Look!" he said',
]
BATCH = 16  # requests that the server runs at once
MALFORMED = [b"{", b'{"model": "tales"}', b'{"model": "tales", "prompt": "a", "nonsense": 1}', b"\xff", b"[1, 2]"]


class Truth:
    """The library's texts, each computed once."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._known, self._lock = llm, dict[tuple[Any, ...], str](), threading.Lock()

    def __call__(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        key = (prompt, tokens, temperature, seed)
        with self._lock:
            if key not in self._known:
                params = SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=seed)
                self._known[key] = self._llm.generate(prompt, params).text
            return self._known[key]


def fill(url: str) -> None:
    """Write as many long texts at once as the server runs."""

    def write(number: int) -> None:
        body = {"model": "tales", "prompt": f"{number}.", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()

    with ThreadPoolExecutor(BATCH) as pool:
        list(pool.map(write, range(BATCH)))


def ask(url: str, number: int, args: argparse.Namespace) -> tuple[str, dict[str, Any], str]:
    """What kind of client it was and what came of it, what it asked, and the text."""
    rng = random.Random(number)
    draw = rng.random()
    if draw < args.malformed:
        reply = httpx.post(
            f"{url}/v1/completions", content=rng.choice(MALFORMED), headers={"content-type": "application/json"}
        )
        return ("refused" if reply.status_code == 400 else "wrongly taken"), {}, ""
    body: dict[str, Any] = {
        "model": "tales", "prompt": f"{rng.choice(BEGINNINGS)} {rng.randrange(args.variety)}",
        "max_tokens": rng.choice([8, 24, 60]), "temperature": rng.choice([0.0, 0.8]), "seed": rng.randrange(2),
    }  # fmt: skip
    if draw < args.malformed + args.dropped:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True, "max_tokens": 600}, timeout=120
        ) as reply:
            for _ in zip(reply.iter_lines(), range(rng.randrange(1, 9)), strict=False):
                pass
        return "dropped", body, ""
    while True:
        if rng.random() < 0.5:
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
            if reply.status_code == 200:
                return "whole", body, reply.json()["choices"][0]["text"]
            status = reply.status_code
        else:
            text, last = "", ""
            with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=300) as reply:
                status = reply.status_code
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                    last = line or last
            if last == "data: [DONE]":
                return "streamed", body, text
        if status != 429:
            return f"lost ({status})", body, ""
        time.sleep(0.2 + rng.random())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, help="go on for so long, however many requests that takes")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--dropped", type=float, default=0.1)
    parser.add_argument("--malformed", type=float, default=0.05)
    parser.add_argument("--variety", type=int, default=8, help="prompts differ in a number below this")
    parser.add_argument("--grow", type=float, default=0.03)
    args = parser.parse_args()
    command = [sys.executable, "-W", "ignore", "-c", "from sakiyomi.cli import main; main()", "serve"]
    command += ["--port", "0", "--exact", "--dtype", "float32", "--max-batch", str(BATCH), "--max-queue", "8"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if line.startswith("serving"))
        threading.Thread(target=lambda: said.writelines(process.stderr), daemon=True).start()
        truth = Truth(LLM("tales", "none", dtype="float32", exact=True))
        fill(url)
        readings: list[int] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.25):
                readings.append(psutil.Process(process.pid).memory_info().rss)

        threading.Thread(target=watch, daemon=True).start()
        began = time.monotonic()
        counts: Counter[str] = Counter()
        wrong: list[dict[str, Any]] = []
        checked: list[tuple[dict[str, Any], str]] = []
        number = 0
        with ThreadPoolExecutor(args.clients) as pool:
            while number < args.requests if args.seconds is None else time.monotonic() - began < args.seconds:
                for kind, body, text in pool.map(lambda i: ask(url, i, args), range(number, number + 4 * args.clients)):
                    counts[kind] += 1
                    if kind in ("whole", "streamed"):
                        checked.append((body, text))
                number += 4 * args.clients
        seconds = time.monotonic() - began
        time.sleep(1)
        figures = httpx.get(f"{url}/metrics").text
        done.set()
        process.terminate()
        code = process.wait(60)
    for body, text in checked:
        if truth(body["prompt"], body["max_tokens"], body["temperature"], body["seed"]) != text:
            wrong.append(body)
    fifth = len(readings) // 5
    early, late = statistics.mean(readings[fifth : 2 * fifth]), statistics.mean(readings[-fifth:])
    lost = sum(count for kind, count in counts.items() if kind.startswith(("lost", "wrongly")))
    left = [
        line
        for line in figures.splitlines()
        if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
    ]
    result = {
        "requests": sum(counts.values()), "seconds": round(seconds, 1), "kinds": dict(counts), "lost": lost,
        "wrong": len(wrong), "exit_code": code, "left": left, "resident_mb": [round(early / 1e6), round(late / 1e6)],
        "grown": late / early - 1,
    }  # fmt: skip
    for body in wrong[:3]:
        print("wrong:", body)
    print(json.dumps(result, ensure_ascii=False))
    sys.exit(bool(lost or wrong or code or result["grown"] > args.grow))


if __name__ == "__main__":
    main()
