"""Clients of all kinds against one server for as long as it is told to: texts must be right, and memory stay flat.

    python benchmarks/server_soak.py                                    # 1000 requests
    python benchmarks/server_soak.py --requests 10000 --faults 0.1 --hostile 1

The server is a process of its own, with ``--exact``; every reply that is not cut off is compared with the library's
text, in the same process as the clients, which has loaded the model once more. A share of requests is faulty, in one of
13 ways: dropped before, in and after the prefill, no JSON, a wrong type, an unknown field, too long, a bad grammar, a
reader who does not read, half a header, half a body, oversized, a wrong key. Hostile neighbours ask for the longest
drafts all the time. Memory is the server's resident one: the mean of the last fifth of the readings against that of the
second fifth. Before the first one every slot of the cache is filled once with a long text: its pages become resident
when they are first written to. At the end nothing may run or wait, and the server must have ended as many samples as
there were. The last line is one JSON object; the exit code is 1 if a reply was wrong or lost, a fault was answered
otherwise than it should be, a sum is wrong, or memory grew by more than ``--grow``.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
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
KEY = "soak"
HEADERS = {"authorization": f"Bearer {KEY}"}
REFUSED: dict[str, tuple[int, dict[str, Any] | bytes]] = {
    "no JSON": (400, b'{"model": "tales", "prompt": '),
    "wrong type": (400, {"prompt": "a", "max_tokens": "many"}),
    "unknown field": (400, {"prompt": "a", "nonsense": 1}),
    "too long": (400, {"prompt": "once upon " * 60_000}),
    "bad grammar": (
        400,
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
    ),
    "oversized": (413, b" " * 8_000_000),
    "wrong key": (401, {"prompt": "a"}),
}
"""Faults that are answered, with the status that they should get."""
CUT = (
    "dropped before prefill",
    "dropped in prefill",
    "dropped after prefill",
    "slow reader",
    "half header",
    "half body",
)
"""Faults of those who go, or do not go on."""


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
        httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=600).raise_for_status()

    with ThreadPoolExecutor(BATCH) as pool:
        list(pool.map(write, range(BATCH)))


def refused(url: str, kind: str) -> bool:
    """Send what is to be refused; whether it was, as it should be."""
    status, body = REFUSED[kind]
    content = body if isinstance(body, bytes) else json.dumps({"model": "tales"} | body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {'other' if kind == 'wrong key' else KEY}"}
    try:
        return httpx.post(f"{url}/v1/completions", content=content, headers=headers, timeout=120).status_code == status
    except httpx.WriteError:  # it was refused, and the connection closed, before all was sent
        return kind == "oversized"


def cut(url: str, kind: str, rng: random.Random) -> None:
    """Go away, or do not go on, at some point of a request."""
    host, port = url.removeprefix("http://").split(":")
    words = "once upon a time there was " * 40 if kind == "dropped in prefill" else "The fox"
    body = {"model": "tales", "prompt": f"{rng.random()} {words}", "max_tokens": 600, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        if kind == "half header":
            connection.sendall(head.encode()[:60])
            time.sleep(1)
        elif kind == "half body":
            connection.sendall(head.encode() + data[: len(data) // 2])
            time.sleep(1)
        else:
            connection.sendall(head.encode() + data)
            if kind == "slow reader":
                time.sleep(5)
            elif kind == "dropped in prefill":
                time.sleep(rng.random() / 20)
            elif kind == "dropped after prefill":
                while b"data:" not in connection.recv(4096):
                    pass


def hostile(url: str, stop: threading.Event) -> None:
    """A neighbour who asks for the longest drafts, again and again."""
    ahead = {"gamma": 256, "nodes": 1024, "tree": "best-first"}
    body = {"model": "tales", "prompt": "Once", "max_tokens": 100, "ignore_eos": True, "speculation": ahead}
    while not stop.is_set():
        httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": "Bearer hostile"}, timeout=600)


def ask(url: str, number: int, args: argparse.Namespace) -> tuple[str, dict[str, Any], str]:
    """What kind of client it was and what came of it, what it asked, and the text."""
    rng = random.Random(number)
    if rng.random() < args.faults:
        kind = rng.choice([*REFUSED, *CUT])
        if kind in CUT:
            cut(url, kind, rng)
        elif not refused(url, kind):
            kind = f"lost ({kind} was answered otherwise)"
        return kind, {}, ""
    body: dict[str, Any] = {
        "model": "tales", "prompt": f"{rng.choice(BEGINNINGS)} {rng.randrange(args.variety)}",
        "max_tokens": rng.choice([8, 24, 60]), "temperature": rng.choice([0.0, 0.8]), "seed": rng.randrange(2),
    }  # fmt: skip
    while True:
        if rng.random() < 0.5:
            reply = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=300)
            if reply.status_code == 200:
                return "whole", body, reply.json()["choices"][0]["text"]
            status = reply.status_code
        else:
            text, last = "", ""
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body | {"stream": True}, headers=HEADERS, timeout=300
            ) as reply:
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
    parser.add_argument("--faults", type=float, default=0.1, help="share of the requests")
    parser.add_argument("--hostile", type=int, default=0, help="neighbours who ask for the longest drafts")
    parser.add_argument("--variety", type=int, default=8, help="prompts differ in a number below this")
    parser.add_argument("--grow", type=float, default=0.03)
    args = parser.parse_args()
    command = [sys.executable, "-W", "ignore", "-c", "from sakiyomi.cli import main; main()", "serve"]
    command += ["--port", "0", "--exact", "--dtype", "float32", "--max-batch", str(BATCH), "--max-queue", "8"]
    command += ["--api-key", f"{KEY},hostile", "--header-timeout", "3"]
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
        neighbours = [threading.Thread(target=hostile, args=(url, done), daemon=True) for _ in range(args.hostile)]
        for neighbour in neighbours:
            neighbour.start()
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
        done.set()
        for neighbour in neighbours:
            neighbour.join()
        time.sleep(6)  # what was cut off is noticed
        figures = httpx.get(f"{url}/metrics", headers=HEADERS).text
        process.terminate()
        code = process.wait(60)
    for body, text in checked:
        if truth(body["prompt"], body["max_tokens"], body["temperature"], body["seed"]) != text:
            wrong.append(body)
    fifth = len(readings) // 5
    early, late = statistics.mean(readings[fifth : 2 * fifth]), statistics.mean(readings[-fifth:])
    lost = sum(count for kind, count in counts.items() if kind.startswith(("lost", "wrongly")))
    sums = {
        name: sum(float(line.split()[-1]) for line in figures.splitlines() if line.startswith(f"vllm:{name}{{"))
        for name in ("num_requests_running", "num_requests_waiting", "request_success_total")
    }
    left = sums["num_requests_running"] + sums["num_requests_waiting"]
    stopped = sum(
        float(line.split()[-1])
        for line in figures.splitlines()
        if line.startswith("vllm:request_success_total{")
        and any(f'finished_reason="{reason}"' in line for reason in ("stop", "length"))
    )
    missing = len(checked) - stopped if not args.hostile else 0  # neighbours' own are among them
    result = {
        "requests": sum(counts.values()), "seconds": round(seconds, 1), "kinds": dict(counts), "lost": lost,
        "wrong": len(wrong), "exit_code": code, "left": left, "ended": sums["request_success_total"],
        "missing_in_metrics": missing, "resident_mb": [round(early / 1e6), round(late / 1e6)],
        "grown": late / early - 1,
    }  # fmt: skip
    for body in wrong[:3]:
        print("wrong:", body)
    print(json.dumps(result, ensure_ascii=False))
    sys.exit(bool(lost or wrong or code or left or missing > 0 or result["grown"] > args.grow))


if __name__ == "__main__":
    main()
