"""Real replicas of `sakiyomi serve` on Ray Serve, beside one server: throughput, and prompts found in the cache.

python benchmarks/replicas.py [--rounds 3] [--conversations 12] [--stream]

Three servers of the embedded pair take turns, so that what else the machine does meets all of them: one held to one
core, one of two cores, two replicas of one core each. Conversations of several turns run at once. Of each lap: tokens/s
of all, the share of prompt tokens that were in the cache, by the replies' own account, and the seconds that each kind
of process took of the processors. (The client's are nobody's, but are taken from the same cores.) The share that two
simulated replicas have stands beside it. Needs the extra scale.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
from urllib.request import urlopen

import psutil

GROUPS = 4
WORDS = ("fox", "boat", "tree", "king", "cat", "river", "stone", "bird", "house", "moon", "child", "garden", "bear")


def system(group: int, words: int = 120) -> str:
    """A system prompt; each group has its own."""
    return " ".join(WORDS[(group + i * (group + 3)) % len(WORDS)] for i in range(words))


def user(conversation: int, turn: int) -> str:
    """What a user says."""
    return " ".join(WORDS[(7 * conversation + 3 * turn + i) % len(WORDS)] for i in range(24))


KINDS = (  # by what their command lines contain
    ("engines", "#Replica#", ":Replica"),
    ("front", "#Front#", ":Front"),
    ("proxy", "ProxyActor", "haproxy"),
    ("controller", "ServeController"),
    ("Ray", "raylet", "gcs_server", "ray/_private", "ray::"),
)
"""Processes of replicas; whatever else belongs to a server is its engine."""


class Running:
    """A server that runs.

    Args:
        url: of its completions.
        process: and those that it has started.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url, self._process = url, psutil.Process(process.pid)

    def worked(self) -> Counter[str]:
        """Seconds of the processor so far, by kind of process."""
        found: Counter[str] = Counter()
        for one in [self._process, *self._process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                line, times = " ".join(one.cmdline()), one.cpu_times()
                kind = next((kind for kind, *marks in KINDS if any(mark in line for mark in marks)), "server")
                found[kind] += times.user + times.system
        return found


@contextlib.contextmanager
def server(cores: set[int], threads: int, *flags: str) -> Iterator[Running]:
    """A server of its own, held to some cores, whose engines have so many threads each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sakiyomi", "serve", "--target", "tales", "--port", str(port), *flags]
    own = os.environ | {"OMP_NUM_THREADS": str(threads)}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    process = subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.sched_setaffinity(0, before)
    try:
        until = time.monotonic() + 600
        while True:
            with contextlib.suppress(OSError):
                urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(command)} did not start")
            time.sleep(0.5)
        yield Running(f"http://127.0.0.1:{port}/v1/completions", process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def ask(connection: HTTPConnection, prompt: str, session: str, new: int, stream: bool) -> tuple[str, dict[str, Any]]:
    """A reply: its text, and its usage."""
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"content-type": "application/json", "x-session-id": session}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    data = connection.getresponse().read()
    if not stream:
        found = json.loads(data)
        return found["choices"][0]["text"], found["usage"]
    events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(one["choices"][0]["text"] for one in events if one["choices"]), events[-1]["usage"]


def lap(running: Running, number: int, asked: argparse.Namespace) -> dict[str, Any]:
    """All conversations at once: tokens/s of the lap, the share of prompt tokens that were in the cache, seconds."""
    counts, lock = Counter[str](), threading.Lock()

    def converse(conversation: int) -> None:
        text, connection = system(conversation % GROUPS), HTTPConnection(running.url.split("/")[2], timeout=600)
        for turn in range(asked.turns):
            text += f"\n{number} {user(conversation, turn)}\n"
            reply, usage = ask(connection, text, f"{number} {conversation}", asked.new, asked.stream)
            text += reply
            with lock:
                counts["new"] += usage["completion_tokens"]
                counts["prompt"] += usage["prompt_tokens"]
                if turn < 2:
                    counts[("first", "second")[turn]] += usage["prompt_tokens"]
                counts["cached"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    worked, own, began = running.worked(), time.process_time(), time.monotonic()
    with ThreadPoolExecutor(asked.conversations) as pool:
        list(pool.map(converse, range(asked.conversations)))
    seconds = time.monotonic() - began
    spent = running.worked() - worked + Counter({"client": time.process_time() - own})
    return {
        "tokens_per_second": counts["new"] / seconds,
        "cached": counts["cached"] / counts["prompt"],
        "first": counts["first"] / asked.conversations,
        "second": counts["second"] / asked.conversations,
        "seconds": seconds,
        "worked": {kind: round(value, 2) for kind, value in spent.items()},
        "load": os.getloadavg()[0],
    }


def simulated(conversations: int, turns: int, new: int, prompts: list[int]) -> float:
    """Share of cached prompt tokens of two simulated replicas with the same router, under the same conversations.

    Args:
        conversations, turns, new: as of ``lap``.
        prompts: tokens of a conversation's first two prompts, on the mean.
    """
    from cluster_simulation import Costs, Load, simulate
    from cluster_simulation import Request as Asked

    said = max(1, prompts[1] - prompts[0] - new)
    costs = Costs((1, 32), (0.004, 0.02), (), (), (1, 512), (0.002, 0.14), 0.0, slots=32)

    class Together(Load):
        """Conversations that begin at once; a seed gives them other names, and so other replicas."""

        def first(self) -> Iterator[Asked]:
            for i in range(conversations):
                yield Asked(1000 * self.seed + i, i % GROUPS, self.system + self.user, self.new, arrived=0.001 * i)

    loads = (Together(1.0, 600.0, turns, GROUPS, prompts[0] - said, said, new, 0.0, seed) for seed in range(50))
    return statistics.mean(simulate(2, costs, load, "hash with slack").cached for load in loads)


def main() -> None:
    """Measure, and print one line of JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="replies come as streams")
    asked = parser.parse_args()
    size = asked.conversations, asked.turns, asked.new
    found: dict[str, list[dict[str, Any]]] = {}
    cores = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        servers = {
            "one core": stack.enter_context(server({max(cores)}, 1)),
            "two cores": stack.enter_context(server(cores, len(cores))),
            "two replicas": stack.enter_context(server(cores, 1, "--replicas", "2")),
        }
        for number in range(asked.rounds + 1):
            for name, running in servers.items():
                done = lap(running, number, asked)
                print(f"lap {number}, {name}:", json.dumps(done), flush=True)
                if number:  # the first warms up
                    found.setdefault(name, []).append(done)
    two = found["two replicas"]
    ratios = {
        f"two replicas against {name}": statistics.median(
            ours["tokens_per_second"] / theirs["tokens_per_second"]
            for ours, theirs in zip(two, found[name], strict=True)
        )
        for name in ("one core", "two cores")
    }
    cached = statistics.mean(done["cached"] for done in two)
    prompts = [round(statistics.mean(done[key] for done in two)) for key in ("first", "second")]
    print(json.dumps({**ratios, "cached": cached, "cached, simulated": simulated(*size, prompts), "laps": found}))


if __name__ == "__main__":
    main()
