"""Clients of all kinds against one server for as long as it is told to: texts must be right, and memory stay flat.

    python benchmarks/server_soak.py                                             # 1000 requests
    python benchmarks/server_soak.py --requests 10000 --seconds 3600 --hostile 2 # the whole: an hour

The server is a process of its own, with ``--exact``, on the embedded ``tales`` with a chat template. Four of five
requests ask for a text, the others for an object by a schema or for a call of a tool. Every reply that is not cut off
is compared: texts with those of the library, in the same process as the clients, which has loaded the model once more;
objects and calls with what the server said before, when it was alone. A share of requests is faulty, in one of 13 ways:
dropped before, in and after the prefill, no JSON, a wrong type, an unknown field, too long, a bad grammar, a reader who
does not read, half a header, half a body, oversized, a wrong key. Hostile neighbours ask for the longest drafts and for
grammars that are too large, all the time.

Memory is the server's resident one: the mean of the last fifth of the readings against that of the second fifth. Before
the first one every slot of the cache is filled once with a long text: its pages become resident when they are first
written to. Sums are exact: each reply's tokens must be those of its line in the server's log, the metrics the sums of
the log's lines by reason, and at the end nothing may run or wait. The last line is one JSON object; the exit code is 1
if a reply was wrong or lost, a fault was answered otherwise than it should be, a sum is wrong, or memory grew by more
than ``--grow``.
"""

from __future__ import annotations

import argparse
import itertools
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from sakiyomi import LLM, SamplingParams
from server_neighbours import bomb

BEGINNINGS = [
    "Once upon a time",
    "The fox went to the river",
    "One day a girl named Lily",
    "むかしむかし",
    '"Look!" he said',
]
BATCH = 16  # requests that the server runs at once
KEY = "soak"
ROUND = 16  # tokens that a round writes at most
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} {% endfor %}{% if tools %}<tool_call> {% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["fox", "girl", "boy"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["who", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "hero", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
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
HOSTILE: tuple[dict[str, Any], ...] = (
    {"max_tokens": 100, "ignore_eos": True, "speculation": {"gamma": 256, "nodes": 1024, "tree": "best-first"}},
    {"response_format": bomb()},
)


@dataclass
class Reply:
    """What came of a request: its kind, how it was asked, what it said, and its tokens by number of the request."""

    kind: str
    body: dict[str, Any] | None = None
    said: str = ""
    number: str = ""
    tokens: int = 0


class Truth:
    """What replies should say, each found once: texts by the library, others by the server while it is alone."""

    def __init__(self, llm: LLM, url: str) -> None:
        self._llm, self._known = llm, dict[str, str]()
        for path, body in constrained():
            said = self._known[json.dumps(body)] = asked(url, path, body, False).said
            json.loads(said.removeprefix("find"))

    def __call__(self, body: dict[str, Any]) -> str:
        key = json.dumps(body)
        if key not in self._known:
            params = SamplingParams(
                max_new_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"]
            )
            self._known[key] = self._llm.generate(body["prompt"], params).text
        return self._known[key]


def constrained() -> Iterator[tuple[str, dict[str, Any]]]:
    """The requests for objects and calls."""
    for start, temperature, seed in itertools.product(BEGINNINGS, (0.0, 0.8), range(2)):
        how = {"model": "tales", "max_tokens": 200, "temperature": temperature, "seed": seed}
        yield TEXTS, how | {"prompt": start, "response_format": FORM}
        tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        yield CHATS, how | {"messages": [{"role": "user", "content": start}]} | tools


CONSTRAINED = list(constrained())


def headers(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def fill(url: str) -> None:
    """Write as many long texts at once as the server runs."""

    def write(number: int) -> None:
        body = {"model": "tales", "prompt": f"{number}.", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
        httpx.post(url + TEXTS, json=body, headers=headers(), timeout=600).raise_for_status()

    with ThreadPoolExecutor(BATCH) as pool:
        list(pool.map(write, range(BATCH)))


def refused(url: str, kind: str) -> bool:
    """Send what is to be refused; whether it was, as it should be."""
    status, body = REFUSED[kind]
    content = body if isinstance(body, bytes) else json.dumps({"model": "tales"} | body).encode()
    told = headers("other" if kind == "wrong key" else KEY) | {"content-type": "application/json"}
    return httpx.post(url + TEXTS, content=content, headers=told, timeout=120).status_code == status


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
                while (part := connection.recv(4096)) and b"data:" not in part:
                    pass


def hostile(url: str, number: int, stop: threading.Event) -> None:
    """A neighbour who asks for too much, again and again."""
    body = {"model": "tales", "prompt": "Once"} | HOSTILE[number % len(HOSTILE)]
    while not stop.is_set():
        httpx.post(url + TEXTS, json=body, headers=headers("hostile"), timeout=600)


def said(choice: dict[str, Any]) -> str:
    """A choice's text, or the call's name and arguments; whole, or a piece."""
    part = choice.get("message") or choice.get("delta") or choice
    text: str = part.get("text") or part.get("content") or ""
    for call in part.get("tool_calls") or []:
        text += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
    return text


def asked(url: str, path: str, body: dict[str, Any], stream: bool) -> Reply:
    """Ask until the server is not too busy, and read it all."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    while True:
        with httpx.stream("POST", url + path, json=body | more, headers=headers(), timeout=300) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        whole = not stream or lines[-1:] == ["[DONE]"]
        if reply.status_code == 200 and whole:
            objects = [json.loads(line) for line in lines if line != "[DONE]"]
            text = "".join(said(choice) for part in objects for choice in part["choices"])
            kind, number = "streamed" if stream else "whole", reply.headers["x-request-id"]
            return Reply(kind, body, text, number, objects[-1]["usage"]["completion_tokens"])
        if reply.status_code != 429:
            return Reply(f"lost ({reply.status_code})", body)
        time.sleep(0.2 + random.random())


def ask(url: str, number: int, args: argparse.Namespace) -> Reply:
    """One client's request, of a kind that its number decides; what ends it otherwise than it should is a loss."""
    try:
        return _ask(url, number, args)
    except (httpx.HTTPError, OSError) as error:
        return Reply(f"lost (request {number}: {error!r})")


def _ask(url: str, number: int, args: argparse.Namespace) -> Reply:
    rng = random.Random(number)
    if rng.random() < args.faults:
        kind = rng.choice([*REFUSED, *CUT])
        if kind in CUT:
            cut(url, kind, rng)
        elif not refused(url, kind):
            kind = f"lost ({kind} was answered otherwise)"
        return Reply(kind)
    if rng.random() < 0.2:
        return asked(url, *rng.choice(CONSTRAINED), stream=rng.random() < 0.5)
    body: dict[str, Any] = {
        "model": "tales", "prompt": f"{rng.choice(BEGINNINGS)} {rng.randrange(args.variety)}",
        "max_tokens": rng.choice([8, 24, 60]), "temperature": rng.choice([0.0, 0.8]), "seed": rng.randrange(2),
    }  # fmt: skip
    return asked(url, TEXTS, body, rng.random() < 0.5)


def sums(metrics: str, log: list[dict[str, Any]], replies: list[Reply]) -> dict[str, Any]:
    """What differs between the replies, the log's lines and the metrics; nothing should.

    A sample whose client goes may get the tokens of one more round after its line.
    """
    lines = {line["request_id"]: line for line in log if "request_id" in line}
    wrong: dict[str, Any] = {}
    differing = [reply.number for reply in replies if lines[reply.number]["completion_tokens"] != reply.tokens]
    if differing:
        wrong["tokens of replies"] = differing
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            found[sample.name + sample.labels.get("finished_reason", "")] += sample.value
    ended = [line["finish_reason"] for line in lines.values() if line.get("finish_reason")]
    reasons = Counter(",".join(ended).split(","))
    logged = {f"vllm:request_success_total{reason}": count for reason, count in reasons.items()}
    for name, value in logged.items():
        if found[name] != value:
            wrong[name] = [found[name], value]
    more = found["vllm:generation_tokens_total"] - sum(line.get("completion_tokens", 0) for line in lines.values())
    if not 0 <= more <= ROUND * reasons["abort"]:
        wrong["tokens behind the log's"] = more
    for name in ("running", "waiting"):
        if left := found[f"vllm:num_requests_{name}"]:
            wrong[name] = left
    return wrong | {"ended": dict(reasons)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="at least so many")
    parser.add_argument("--seconds", type=float, default=0.0, help="and at least so long")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--faults", type=float, default=0.1, help="share of the requests")
    parser.add_argument("--hostile", type=int, default=0, help="neighbours who ask for too much")
    parser.add_argument("--variety", type=int, default=2, help="prompts differ in a number below this")
    parser.add_argument("--grow", type=float, default=0.01)
    args = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    template, log = Path(folder.name) / "template.jinja", Path(folder.name) / "log"
    template.write_text(TEMPLATE, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-c", "from sakiyomi.cli import main; main()", "serve"]
    command += ["--port", "0", "--exact", "--dtype", "float32", "--max-batch", str(BATCH), "--max-queue", "8"]
    command += ["--api-key", f"{KEY},hostile", "--header-timeout", "3", "--log-format", "json"]
    with folder, log.open("w", encoding="utf-8") as kept:
        process = subprocess.Popen(
            [*command, "--chat-template", str(template)], stderr=subprocess.PIPE, encoding="utf-8"
        )
        assert process.stderr is not None
        url = next(line.split()[-1].strip('"}') for line in process.stderr if '"serving ' in line)
        logging = threading.Thread(target=lambda: kept.writelines(process.stderr), daemon=True)
        logging.start()
        truth = Truth(LLM("tales", "none", dtype="float32", exact=True), url)
        fill(url)
        readings: list[int] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.25):
                readings.append(psutil.Process(process.pid).memory_info().rss)

        threading.Thread(target=watch, daemon=True).start()
        neighbours = [threading.Thread(target=hostile, args=(url, i, done), daemon=True) for i in range(args.hostile)]
        for neighbour in neighbours:
            neighbour.start()
        began = time.monotonic()
        replies: list[Reply] = []
        with ThreadPoolExecutor(args.clients) as pool:
            while len(replies) < args.requests or time.monotonic() - began < args.seconds:
                numbers = range(len(replies), len(replies) + 4 * args.clients)
                replies += pool.map(lambda number: ask(url, number, args), numbers)
                print(f"{len(replies)} requests, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        seconds = time.monotonic() - began
        done.set()
        for neighbour in neighbours:
            neighbour.join()
        time.sleep(6)  # what was cut off is noticed
        metrics = httpx.get(f"{url}/metrics", headers=headers()).text
        process.terminate()
        code = process.wait(60)
        logging.join()
        kept.flush()
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    whole = [reply for reply in replies if reply.number]
    wrong = [reply.body for reply in whole if truth(reply.body) != reply.said]
    differing = sums(metrics, lines, whole)
    ended = differing.pop("ended")
    fifth = len(readings) // 5
    resident = [statistics.mean(readings[i * fifth : (i + 1) * fifth]) for i in range(5)]
    counts = Counter(reply.kind for reply in replies)
    lost = sum(count for kind, count in counts.items() if kind.startswith("lost"))
    result = {
        "requests": len(replies), "seconds": round(seconds, 1), "kinds": dict(counts), "lost": lost,
        "constrained": sum(not {"tools", "response_format"}.isdisjoint(reply.body or {}) for reply in whole),
        "wrong": len(wrong), "exit_code": code, "ended": ended, "differing": differing,
        "resident_mb": [round(mean / 1e6) for mean in resident], "grown": resident[-1] / resident[1] - 1,
    }  # fmt: skip
    for body in wrong[:3]:
        print("wrong:", body)
    print(json.dumps(result, ensure_ascii=False))
    sys.exit(bool(lost or wrong or code or differing or result["grown"] > args.grow))


if __name__ == "__main__":
    main()
