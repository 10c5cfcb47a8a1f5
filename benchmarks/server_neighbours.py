"""How long a short request takes beside seven clients who want too much, against seven ordinary ones.

    python benchmarks/server_neighbours.py                          # every kind
    python benchmarks/server_neighbours.py --kinds speculation prompts --rounds 5

The server is a process of its own with the embedded pair. For each kind the victim sends requests for 20 tokens, one
after the other, first beside seven ordinary clients (40 tokens each, again and again), then beside seven of that kind,
by turns. The figure is the ratio of the 95th percentiles, with the medians beside it. What neighbours send is made
before anything is timed, and they read replies without looking at them: victim, neighbours and server share the
machine. The last line is one JSON object; the exit code is 1 if a ratio is above ``--most`` or a victim got no reply.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from server import server

NEIGHBOURS = 7
PATIENCE = 120.0  # seconds that the victim waits for a reply


def post(body: dict[str, Any] | bytes, path: str = "/v1/completions") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "tales", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, **more}


def bomb() -> dict[str, Any]:
    """A schema whose grammar is large: many alternatives, deeply nested, with counted repetitions."""
    inner: dict[str, Any] = {"type": "string", "pattern": "^(a|b|ab|ba){1,200}$"}
    for depth in range(8):
        inner = {
            "type": "array", "minItems": 1, "maxItems": 50,
            "items": {"anyOf": [inner, {"type": "object", "properties": {f"k{depth}_{i}": inner for i in range(2)}}]},
        }  # fmt: skip
    return {"type": "json_schema", "json_schema": {"name": "bomb", "schema": inner}}


KINDS: dict[str, Callable[[], bytes]] = {
    "ordinary": lambda: post(asked()),
    "speculation": lambda: post(asked(speculation={"gamma": 256, "nodes": 1024, "tree": "best-first"})),
    "prompts": lambda: post(asked(prompt="a" * 3_900_000)),
    "ids": lambda: post(asked(prompt=[5] * 1_300_000)),
    "biases": lambda: post(asked(logit_bias={f"{i:06d}": 1.0 for i in range(100_000)})),
    "samples": lambda: post(asked(n=128)),
    "allowed-samples": lambda: post(asked(n=16)),
    "grammar": lambda: post(asked(response_format=bomb())),
    "slow-readers": lambda: post(asked(stream=True, max_tokens=400)),
    "half-requests": lambda: post(asked())[:120],
}
"""What a neighbour of each kind sends."""


async def neighbour(address: tuple[str, int], data: bytes, kind: str, counts: dict[str, int]) -> None:
    """Send it, again and again; half a request is left open, and what is read slowly is not read at all."""
    while True:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(*address, limit=1024)
            writer.write(data)
            with contextlib.suppress(TimeoutError):
                if kind in ("half-requests", "slow-readers"):
                    await asyncio.sleep(5)
                    continue
                await writer.drain()
                status = await asyncio.wait_for(reader.readline(), PATIENCE)
                counts[status[9:12].decode() or "cut"] = counts.get(status[9:12].decode() or "cut", 0) + 1
                while await reader.read(65536):
                    pass
        except (ConnectionError, OSError):
            counts["cut"] = counts.get("cut", 0) + 1
            await asyncio.sleep(0.05)
        finally:
            if writer is not None:
                writer.transport.abort()


async def victim(address: tuple[str, int], number: int) -> float:
    """Seconds for 20 tokens."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(post(asked(prompt=f"{number}. The fox", max_tokens=20)))
    reply = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    if not reply.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the victim got {reply[:300]!r}")
    return time.perf_counter() - began


async def beside(
    address: tuple[str, int], kind: str, data: bytes, requests: int, numbers: itertools.count[int]
) -> tuple[list[float], dict[str, int]]:
    """The victim's times beside neighbours of a kind, and what these got."""
    counts: dict[str, int] = {}
    tasks = [asyncio.ensure_future(neighbour(address, data, kind, counts)) for _ in range(NEIGHBOURS)]
    try:
        await asyncio.sleep(1)
        return [await victim(address, next(numbers)) for _ in range(requests)], counts
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.5)


def percentile(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.95 * len(times)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hostile = [kind for kind in KINDS if kind != "ordinary"]
    parser.add_argument("--kinds", nargs="+", choices=hostile, default=hostile)
    parser.add_argument("--requests", type=int, default=20, help="of the victim, in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=float, default=2.0)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of `sakiyomi serve`, all that follows")
    args = parser.parse_args()
    command = [sys.executable, "-W", "ignore", "-m", "sakiyomi", "serve", "--max-batch", "8", *args.options]
    result: dict[str, Any] = {"load_before": os.getloadavg()[0], "requests": args.requests, "rounds": args.rounds}
    numbers = itertools.count()
    with server(command, "/health") as (url, process):
        host, port = url.removeprefix("http://").split(":")
        address = (host, int(port))
        ordinary = KINDS["ordinary"]()
        asyncio.run(beside(address, "ordinary", ordinary, args.requests, numbers))  # kernels, traces
        for kind in args.kinds:
            data = KINDS[kind]()
            found: dict[str, list[float]] = {"ordinary": [], kind: []}
            replies: dict[str, int] = {}
            for _ in range(args.rounds):
                found["ordinary"] += asyncio.run(beside(address, "ordinary", ordinary, args.requests, numbers))[0]
                times, replies = asyncio.run(beside(address, kind, data, args.requests, numbers))
                found[kind] += times
            tail = {name: percentile(times) for name, times in found.items()}
            middle = {name: statistics.median(times) for name, times in found.items()}
            ratio = tail[kind] / tail["ordinary"]
            print(
                f"{kind:<16} p95 {tail[kind]:7.3f} s against {tail['ordinary']:.3f}: {ratio:6.2f}x; median "
                f"{middle[kind]:.3f} against {middle['ordinary']:.3f}; replies to neighbours {replies}",
                flush=True,
            )
            result[kind] = {"ratio": ratio, "p95": tail, "median": middle, "replies": replies}
        result["resident_mb"] = round(process.memory_info().rss / 1e6)
    print(json.dumps(result))
    sys.exit(any(result[kind]["ratio"] > args.most for kind in args.kinds))


if __name__ == "__main__":
    main()
