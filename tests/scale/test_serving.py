"""Replicas on Ray Serve while they come and go: no request notices. Needs the extra scale; skipped without."""

from __future__ import annotations

import functools
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from clusters import StubServer, cluster
from sakiyomi import LLM, InputError, SamplingParams
from sakiyomi.core.errors import LoadError
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.cluster import ReplicaOptions
from sakiyomi.scale.wire import Line
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.run import uvicorn_config

ray = pytest.importorskip("ray", reason="needs the extra scale")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

CLIENTS = 6
NEW = 24


CONFIG = ServerConfig(request_timeout=60)


def free_port() -> int:
    """For Serve, which does not tell what the system gives it; none that the system gives somebody else meanwhile."""
    draws = random.SystemRandom()
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", draws.randrange(10_000, 30_000))) as free:
            return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster whose Serve listens at `nodes.port`."""
    from ray import serve

    with cluster(nodes=1, cpus=4) as made:
        made.port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": made.port}, proxy_location="HeadOnly")
        yield made
        serve.shutdown()


def deploy(make: Any, replicas: int | str, slots: int = 32) -> None:
    from sakiyomi.scale.launch import started
    from sakiyomi.scale.serving import application, deployment

    of = deployment(make, CONFIG, ReplicaOptions(replicas=str(replicas)), LLMConfig(max_batch=slots))
    assert started(application(of, CONFIG), "sakiyomi", 300, threading.Event(), "/")


@contextmanager
def front() -> Iterator[int]:
    """The front that `sakiyomi serve` has, for the replicas of `deploy`; its port."""
    from ray import serve

    from sakiyomi.scale.front import make_front
    from sakiyomi.scale.serving import RayReplicas

    replicas = RayReplicas(serve.get_deployment_handle("Replica", "sakiyomi"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn_config(make_front(replicas, CONFIG, replicas.lifespan), CONFIG))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


def replicas() -> set[str]:
    """Their names."""
    from sakiyomi.scale.serving import processes

    return set(processes("sakiyomi"))


def ask(client: httpx.Client, url: str, number: int) -> list[str]:
    """The text of a stream, or the errors in it."""
    body = {"prompt": [1 + number % 90, 5], "max_tokens": NEW, "seed": number, "stream": number % 2 == 0}
    reply = client.post(url, json={**body, "ignore_eos": True})
    if reply.status_code != 200:
        return [f"{reply.status_code}: {reply.text[:300]}"]
    if "text/event-stream" not in reply.headers["content-type"]:
        return [] if reply.json()["usage"]["completion_tokens"] == NEW else [f"short: {reply.text[:300]}"]
    whole = "[DONE]" in reply.text and '"finish_reason":"length"' in reply.text.replace(" ", "")
    return [] if whole and "error" not in reply.text else [f"broken: {reply.text[-300:]}"]


class Load:
    """Clients that ask one request after the other while the block runs, at each of some ports by turns."""

    def __init__(self, *ports: int) -> None:
        self._urls = [f"http://127.0.0.1:{port}/v1/completions" for port in ports]
        self._over = threading.Event()
        self.errors: list[str] = []
        self.replies = 0

    def _client(self, number: int) -> None:
        with httpx.Client(timeout=120) as client:
            while not self._over.is_set():
                found = ask(client, self._urls[self.replies % len(self._urls)], number)
                self.replies += 1
                self.errors += found
                number += CLIENTS

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._client, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()


def wait_for(count: int, gone: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    until = time.monotonic() + 180
    while len(found := replicas()) != count or found & gone:
        assert time.monotonic() < until, (found, gone)
        time.sleep(0.2)


def test_scale_down_and_update_under_load(nodes: Any) -> None:
    """Two replicas become one, and the one two others; nobody hears of it, where Serve listens and where the command
    does."""
    deploy(functools.partial(StubServer, 0.02), 2)
    with front() as port, Load(nodes.port, port) as load:
        time.sleep(3)
        deploy(functools.partial(StubServer, 0.02), 1)
        wait_for(1)
        down, before = load.replies, replicas()
        deploy(functools.partial(StubServer, 0.01), 2)
        wait_for(2, gone=before)
        time.sleep(3)
    print(f"{load.replies} replies, {down} of them until one replica was gone; {len(load.errors)} errors")
    assert load.errors == []
    assert load.replies > down > CLIENTS


def test_replicas_grow_with_the_load(nodes: Any) -> None:
    """Of one to two replicas with four slots each, one; six clients are more than three quarters of its slots."""
    deploy(functools.partial(StubServer, 0.02), 1)
    wait_for(1)  # those of another test may run
    deploy(functools.partial(StubServer, 0.02), "1:2", slots=4)
    with front() as port, Load(nodes.port, port) as load:
        wait_for(2)
        alone = load.replies
        time.sleep(3)
    print(f"{load.replies} replies, {alone} of them until there were two; {len(load.errors)} errors")
    assert load.errors == [] and load.replies > alone > CLIENTS


def shown(port: int) -> list[tuple[int, int]]:
    """Of each replica that answers its process and how many requests run there, by the page that shows them."""
    page = httpx.get(f"http://127.0.0.1:{port}/replicas", timeout=30).text
    return [(int(pid), int(running)) for pid, running in re.findall(r"<tr><td>[^<]*<td>[^<]*<td>(\d+)<td>(\d+)", page)]


def until(what: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def streamed(port: int, number: int) -> list[str]:
    """The texts of a stream's events."""
    body = {"prompt": [1 + number, 5], "max_tokens": 400, "seed": number, "stream": True, "ignore_eos": True}
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
    events = reply.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]", reply.text[-300:]
    return [json.loads(event[6:])["choices"][0]["text"] for event in events]


def test_streams_outlive_a_replica_that_is_killed(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token comes once; streams come by sockets, and none is left."""
    lines: list[Line] = []
    parts = Line.parts

    def noted(line: Line, *given: Any) -> Any:
        lines.append(line)
        return parts(line, *given)

    monkeypatch.setattr(Line, "parts", noted)
    deploy(functools.partial(StubServer, 0.02), 2)
    with front() as port, ThreadPoolExecutor(8) as pool:
        right = [streamed(port, number) for number in range(8)]
        assert len(lines) == 8
        asked = [pool.submit(streamed, port, number) for number in range(8)]
        until(lambda: len(lines) == 16)
        victim = psutil.Process(max(shown(port), key=lambda replica: replica[1])[0])
        assert "Replica" in " ".join(victim.cmdline())
        victim.kill()
        found = [one.result() for one in asked]
        assert ["".join(texts) for texts in found] == ["".join(texts) for texts in right]
        assert len(lines) > 16
        assert all(line.there.result()[1].is_closing() for line in lines)
    with pytest.raises(OSError):
        socket.create_connection(lines[-1].address[:2], 1)


def test_a_client_that_goes_frees_its_slot(nodes: Any) -> None:
    deploy(functools.partial(StubServer, 0.02), 1)
    body = {"prompt": [3, 5], "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with front() as port:
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()  # closed, it would close the stream
            assert next(lines).startswith("data:")
            until(lambda: sum(running for _, running in shown(port)) == 1)
        until(lambda: sum(running for _, running in shown(port)) == 0)


class Hanging:
    """A model whose loading does not end."""

    def __call__(self) -> Any:
        time.sleep(3600)


def test_a_start_that_hangs_is_one_error(nodes: Any) -> None:
    """And nothing is left of it; what else the cluster serves goes on."""
    from ray import serve

    from sakiyomi.scale.launch import running
    from sakiyomi.scale.serving import deployment, processes

    of = deployment(Hanging(), CONFIG, ReplicaOptions(replicas="1"), LLMConfig(max_batch=32))
    others, began = set(serve.status().applications), time.monotonic()
    with (
        pytest.raises(LoadError, match=r"not ready within 4 s \(1 starting"),
        running(of, "hangs", 4, threading.Event()),
    ):
        pass
    assert time.monotonic() - began < 30
    assert not processes("hangs")
    assert set(serve.status().applications) == others


def test_the_command(nodes: Any) -> None:
    """The embedded model in a replica; the text is that of the engine, and Ctrl-C leaves the cluster as it was."""
    from ray import serve

    flags = ["--target", "tales", "--dtype", "float32", "--replicas", "1", "--address", nodes.address]
    others, port = set(serve.status().applications), free_port()
    command = [sys.executable, "-m", "sakiyomi", "serve", *flags, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8")
    assert process.stderr is not None
    assert any("at http://" in line for line in iter(process.stderr.readline, "")), process.wait()
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
    params = SamplingParams(max_new_tokens=12)
    assert reply["choices"][0]["text"] == LLM("tales", dtype="float32").generate(body["prompt"], params).text
    assert httpx.get(f"http://127.0.0.1:{port}/health").json() == {"status": "ok", "replicas": 1}
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0, process.stderr.read()
    assert set(serve.status().applications) == others


def test_what_makes_no_sense_is_refused() -> None:
    from sakiyomi.scale.serving import build

    with pytest.raises(InputError, match="start_timeout is 0"):
        ReplicaOptions(replicas="1", start_timeout=0.0)
    with pytest.raises(InputError, match="give this command there, with --address auto"):
        ReplicaOptions(replicas="1", address="ray://head:10001")
    with pytest.raises(InputError, match="'start_timeout' is a setting of `sakiyomi serve`"):
        build({"start_timeout": "5"})
    with pytest.raises(InputError, match="'port' is a setting of `sakiyomi serve`"):
        build({"port": 9000})
    with pytest.raises(InputError, match="replicas is 0; expected a number from 1 on"):
        build({"replicas": 0})
    assert build({"target": "tales", "replicas": 2})  # as a file of settings has it
