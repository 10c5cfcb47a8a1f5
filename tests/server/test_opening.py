"""The port is open while the model loads: what clients are told, what waits, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest

from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.opening import RETRY_AFTER
from sakiyomi.server.paths import make_app
from sakiyomi.server.run import Listening
from server_toys import toy_llm

ASKED = {"model": "toy", "prompt": "Once upon", "max_tokens": 4}
web = httpx.Client(timeout=30, trust_env=False)


@contextmanager
def opened(**config: Any) -> Iterator[Listening]:
    with Listening(ServerConfig(port=0, served_name="toy", **config)) as listening:
        yield listening


def served(listening: Listening) -> None:
    """Give it a model, and end it by a signal as soon as it is ready."""
    server = Server(toy_llm("none"), listening.config)
    over = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    listening.run(make_app(server), server.worker, lambda url: over.start())


def test_what_is_done_is_told() -> None:
    with opened() as listening:
        listening.tell("reading the model")
        for path in ("/health", "/v1/models", "/metrics"):
            found = web.get(listening.url + path)
            assert found.status_code == 503 and found.headers["retry-after"] == str(RETRY_AFTER)
            told = found.json()
            assert told["status"] == "loading" and told["doing"] == "reading the model" and told["seconds"] >= 0
            assert told["error"]["code"] == "loading" and "reading the model" in told["error"]["message"]
        page = web.get(listening.url)
        assert page.status_code == 503 and "is loading" in page.text and "health" in page.text
        assert "script-src 'sha256-" in page.headers["content-security-policy"]


def test_requests_wait_for_the_model() -> None:
    with opened() as listening, ThreadPoolExecutor(1) as pool:
        asked: Future[httpx.Response] = pool.submit(web.post, f"{listening.url}/v1/completions", json=ASKED)
        time.sleep(0.2)
        assert not asked.done()
        served(listening)
        assert asked.result().status_code == 200 and asked.result().json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_requests_are_refused_by_a_setting(path: str) -> None:
    with opened(while_loading="refuse") as listening:
        found = web.post(listening.url + path, json=ASKED)
        assert found.status_code == 503
        kind = {"/v1/completions": "server_error", "/v1/messages": "overloaded_error"}[path]
        assert found.json()["error"]["type"] == kind


def test_who_waits_is_told_that_there_will_be_no_model() -> None:
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="damaged"), opened() as listening:
            asked = pool.submit(web.post, f"{listening.url}/v1/completions", json=ASKED)
            time.sleep(0.2)
            raise ValueError("damaged")
        assert asked.result().status_code == 503
    with pytest.raises(httpx.ConnectError):
        web.get(listening.url)


def test_a_wait_has_an_end() -> None:
    with opened(request_timeout=0.2) as listening:
        assert web.post(f"{listening.url}/v1/completions", json=ASKED).status_code == 503


def test_an_application_that_does_not_start_says_why() -> None:
    server = Server(toy_llm("none"), ServerConfig())

    @asynccontextmanager
    async def broken(app: Any) -> AsyncIterator[None]:
        raise ValueError("no events")
        yield

    server.lifespan = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match="no events"), opened() as listening:
        listening.run(make_app(server), server.worker)


def test_what_opens_the_port_imports_neither_torch_nor_fastapi() -> None:
    script = """
import sys
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.run import Listening
with Listening(ServerConfig(port=0)):
    print([name for name in ("torch", "transformers", "fastapi", "pydantic") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_while_it_loads_ends_it(kind: signal.Signals, code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "sakiyomi", "serve", "--target", "tales", "--port", str(port)]

    def heeds() -> None:  # a shell has what it runs in the background ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", preexec_fn=heeds) as run:
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                try:
                    assert web.get(f"http://127.0.0.1:{port}/health").status_code == 503
                    break
                except httpx.ConnectError:
                    time.sleep(0.02)
            run.send_signal(kind)
            assert run.wait(30) == code
            assert run.stderr is not None and "Traceback" not in run.stderr.read()
        finally:
            run.kill()
