"""Clients that go, lie, shout or dawdle, and an engine that fails: the others get their texts, and slots come back."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from typer.testing import CliRunner

from processes import until
from sakiyomi import LLM, SamplingParams
from sakiyomi.cli import app
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import api_error
from sakiyomi.server.logs import set_up
from sakiyomi.server.run import Listening, check
from server_toys import client, figures, running, toy_llm, web
from toys import save_model, tiny_llama, tiny_tokenizer
from warm import warm

ROOT = Path(__file__).resolve().parents[2]
ENDLESS: dict[str, Any] = {"model": "toy", "prompt": "Once", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Server, str]]:
    with running(toy_llm(max_batch=2), max_queue=2, max_body=20_000) as found:
        yield found


def idle(server: Server) -> bool:
    return server.worker.load == 0 and not server.llm.engine.busy


def works(url: str, own: LLM) -> None:
    reply = client(url).completions.create(model="toy", prompt="The fox", max_tokens=12, temperature=0)
    assert reply.choices[0].text == own.generate("The fox", SamplingParams(max_new_tokens=12)).text


# ---------------------------------------------------------------- clients


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [True, False])
def test_a_dropped_client_frees_its_slot(site: tuple[Server, str], own: LLM, stream: bool) -> None:
    server, url = site
    before = figures(url).get("vllm:request_success_total/abort", 0)
    if stream:
        with web.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True}) as reply:
            lines = reply.iter_lines()  # kept: the connection ends with it
            assert next(lines).startswith("data:") and server.worker.load == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            web.post(f"{url}/v1/completions", json=ENDLESS, timeout=0.3)
    until(lambda: idle(server))
    assert figures(url)["vllm:request_success_total/abort"] == before + 1
    assert figures(url)["vllm:num_requests_running"] == 0
    works(url, own)


def test_a_client_that_goes_while_it_waits_frees_its_place(own: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sakiyomi.server")
    with running(toy_llm("none", max_batch=1)) as (server, url):
        with web.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True}) as reply:
            lines = reply.iter_lines()  # kept, as above
            assert next(lines)
            with pytest.raises(httpx.ReadTimeout):
                web.post(f"{url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=0.3)
            until(lambda: server.worker.load == 1)
            until(lambda: "POST /v1/completions 499" in caplog.text)
        works(url, own)


def test_a_full_queue_says_when_to_come_again(site: tuple[Server, str], own: LLM) -> None:
    server, url = site
    with ThreadPoolExecutor(4) as pool:
        stop = threading.Event()

        def hold(_: int) -> None:
            with web.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=30) as reply:
                for _ in reply.iter_lines():
                    if stop.is_set():
                        return

        try:
            held = [pool.submit(hold, i) for i in range(4)]
            until(lambda: server.worker.load == 4)
            until(lambda: figures(url)["vllm:num_requests_waiting"] == 2)
            with pytest.raises(openai.RateLimitError, match="try again") as caught:
                client(url).completions.create(model="toy", prompt="a")
            assert int(caught.value.response.headers["retry-after"]) >= 1
        finally:
            stop.set()
        for one in held:
            one.exception()
    until(lambda: idle(server))
    works(url, own)


@pytest.mark.thorough
def test_a_slow_reader_holds_up_nobody(own: LLM) -> None:
    """It asks and does not read: its text is written, its slot is free, and when its time is up it is cut off."""
    with running(toy_llm("none", max_batch=1), request_timeout=8) as (server, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            slow.connect((host, int(port)))
            body = json.dumps(ENDLESS | {"stream": True, "max_tokens": 300, "trace": True}).encode()
            head = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"]
            slow.sendall("\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body)
            until(lambda: server.worker.load == 1)
            works(url, own)  # in the only slot
            until(lambda: idle(server))


@pytest.mark.thorough
def test_a_request_ends_when_its_time_is_up(own: LLM) -> None:
    with running(toy_llm("none", max_batch=1), request_timeout=0.4) as (server, url):
        reply = web.post(f"{url}/v1/completions", json=ENDLESS)
        assert reply.status_code == 504 and reply.json()["error"]["code"] == "timeout"
        assert reply.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match="not finished within"):
            list(client(url).completions.create(**{k: v for k, v in ENDLESS.items() if k != "ignore_eos"},
                                                stream=True, extra_body={"ignore_eos": True}))  # fmt: skip
        until(lambda: idle(server))


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 400, "invalid_body"),
        (b"{", 400, "invalid_json"),
        (b"\xff\xfe", 400, None),
        (b"[]", 400, None),
        (b"null", 400, None),
        (b"{}", 400, "missing_field"),
        (b'{"model": "toy", "prompt": "a", "temperature": NaN}', 400, "invalid_value"),
        (b'{"model": "toy", "prompt": "a", "temperature": 1e999}', 400, "invalid_value"),
        (b'{"model": "toy", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, None),
        (b'{"model": "toy", "prompt": "a\\ud800"}', 400, None),
        (b'{"model": "toy", "prompt": ["a", 1]}', 400, "invalid_value"),
        (b'{"model": "toy", "prompt": "a", "max_tokens": true}', 400, "invalid_value"),
        (b"[" * 9000, 400, "invalid_json"),
        (b'{"model": "toy", "prompt": "a", "stop": ["\\udc00"]}', 400, "invalid_value"),
        (b'{"model": "toy", "prompt": "a", "\\ud800": 1}', 400, "invalid_body"),
        (b'{"model": "toy", "prompt": "' + b"a" * 20_000 + b'"}', 413, "body_too_large"),
    ],
)
def test_bodies_that_are_none(site: tuple[Server, str], content: bytes, status: int, code: str | None) -> None:
    reply = web.post(f"{site[1]}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert code is None or reply.json()["error"]["code"] == code


def test_ten_megabytes_are_refused_before_they_are_read(site: tuple[Server, str], own: LLM) -> None:
    def parts() -> Iterator[bytes]:  # without a length, so that only counting helps
        for _ in range(10):
            yield b"a" * 1_000_000

    for content in (*[b"a" * 10_000_000] * 5, parts()):
        assert web.post(f"{site[1]}/v1/completions", content=content).status_code == 413
    works(site[1], own)


def test_a_refused_body_is_read_on_for_a_moment_alone(site: tuple[Server, str]) -> None:
    """Neither who stops sending holds the server, nor who never stops."""
    host, port = site[1].removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000000\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        began = time.monotonic()
        connection.sendall(head + b"\r\n" + b"a" * 1000)
        assert connection.recv(100).startswith(b"HTTP/1.1 413") and time.monotonic() - began < 5
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head + b"\r\n")
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 1 << 30:
                sent += connection.send(b"a" * 1_000_000)
        assert sent < 1 << 28
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        began = time.monotonic()
        connection.sendall(head + b"expect: 100-continue\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413") and time.monotonic() - began < 5


def test_a_form_of_a_foreign_page_is_no_request(site: tuple[Server, str]) -> None:
    """A page can have a browser post text/plain anywhere without asking; no header lets it read an answer either."""
    content = json.dumps({"model": "toy", "prompt": "a"})
    headers = {"content-type": "text/plain", "origin": "http://evil.example"}
    reply = web.post(f"{site[1]}/v1/completions", content=content, headers=headers)
    assert reply.status_code == 400 and "header content-type: application/json" in reply.json()["error"]["message"]
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    "text", ["\u0000", "\ufeffa", "a\u0301", "👨‍👩‍👧🇯🇵", "\u202egnirts", "x\r\n\t", "﷽" * 50, "\U0010ffff"]
)
def test_unicode_of_every_kind(site: tuple[Server, str], own: LLM, text: str) -> None:
    reply = client(site[1]).completions.create(
        model="toy", prompt=text, max_tokens=8, temperature=0, user=text, stop=[text]
    )
    expected = own.generate(text, SamplingParams(max_new_tokens=8, stop=[text]))
    assert reply.choices[0].text == expected.text


# ---------------------------------------------------------------- keys, origins, logs


def test_a_key_guards_all_but_the_health(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def digest(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr("hmac.compare_digest", digest)  # in constant time, as == is not
    with running(toy_llm("none"), api_key="secret") as (_, url):
        assert web.get(f"{url}/health").status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert web.get(url + path).status_code == 401
            for wrong in ("Bearer", "Bearer secre", "Bearer secrets", "Basic secret", "secret", "Bearer é"):
                assert web.get(url + path, headers={"authorization": wrong.encode()}).status_code == 401
            assert web.get(url + path, headers={"authorization": "bearer secret"}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            client(url, api_key="other").models.list()
        assert client(url, api_key="secret").models.list()
    assert {(b"secre", b"secret"), (b"secret", b"secret")} <= set(compared)


def test_origins_that_were_named_may_call() -> None:
    with running(toy_llm("none"), cors_origins=("http://friend.example",), api_key="secret") as (_, url):
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for name, allowed in (("http://friend.example", True), ("http://evil.example", False)):
            reply = web.options(f"{url}/v1/completions", headers=ask | {"origin": name})
            assert (reply.headers.get("access-control-allow-origin") == name) == allowed
            reply = web.get(f"{url}/v1/models", headers={"origin": name})
            assert reply.status_code == 401
            assert (reply.headers.get("access-control-allow-origin") == name) == allowed  # it may read why


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    return [line for line in fields if line.get("path") == "/v1/completions"]


@pytest.mark.parametrize("wanted", [False, True])
def test_the_log_has_no_prompts_unless_it_is_told_to(caplog: pytest.LogCaptureFixture, wanted: bool) -> None:
    with running(toy_llm("none"), log_prompts=wanted) as (_, url), caplog.at_level(logging.DEBUG, "sakiyomi"):
        for stream in (False, True):
            reply = client(url).completions.create(
                model="toy", prompt="The secret word", max_tokens=40, temperature=0, user="ann", stream=stream
            )
            text = "".join(e.choices[0].text for e in reply) if stream else reply.choices[0].text  # type: ignore[union-attr]
        until(lambda: len(lines(caplog)) == 2)  # the stream's comes after its last event
    said = "".join(json.dumps(getattr(r, "fields", {}), ensure_ascii=False) + r.getMessage() for r in caplog.records)
    assert ("secret word" in said) == (json.dumps(text, ensure_ascii=False) in said) == wanted
    found = lines(caplog)
    assert [(line["status"], line["user"], line["completion_tokens"]) for line in found] == [(200, "ann", 40)] * 2
    assert all(line["finish_reason"] == "length" and line["first_token_ms"] > 0 for line in found)


@pytest.mark.parametrize("kind", ["text", "json"])
def test_no_output_at_all_has_a_prompt_in_it(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the server fails at it, and says so with a traceback; nobody writes lines of his own into the log."""
    said, word = io.StringIO(), "".join(["se", "cret"])  # so that no line of this test, in a traceback, has it
    llm = toy_llm("none")
    before = [
        (logger, logger.handlers, logger.propagate)
        for n in ("sakiyomi", "uvicorn.error")
        if (logger := logging.getLogger(n))
    ]
    set_up(kind, said)
    try:
        with running(llm) as (server, url):
            body = {"model": "toy", "prompt": word, "max_tokens": 4}
            chat = {"model": "toy", "messages": [{"role": "user", "content": word}], "max_tokens": 4}
            for extra in (
                {},
                {"stream": True},
                {"n": 0},
                {word: 1},
                {"max_tokens": 5000},
                {"stop": [word, ""]},
            ):
                web.post(f"{url}/v1/completions", json=body | extra)
                web.post(f"{url}/v1/chat/completions", json=chat | extra)
            web.post(
                f"{url}/v1/completions", content=b"{" + word.encode(), headers={"content-type": "application/json"}
            )
            assert web.get(f"{url}/v1/x%0a12:00:00 info     POST /v1/completions 200").status_code == 404

            def broken(*_: Any, **__: Any) -> Any:
                try:
                    raise KeyError(word)
                except KeyError as error:
                    raise ValueError(f"I cannot read {word}") from error

            with monkeypatch.context() as patch:
                patch.setattr("sakiyomi.server.bodies.prompt_tokens", broken)
                assert web.post(f"{url}/v1/completions", json=body).status_code == 500
            monkeypatch.setattr("sakiyomi.server.replies.Sample.read", broken)
            assert web.post(f"{url}/v1/completions", json=body).status_code == 500
            assert "internal_error" in web.post(f"{url}/v1/completions", json=body | {"stream": True}).text
            until(lambda: idle(server))
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
    found = said.getvalue()
    assert word not in found
    assert found.count("ValueError (what it says") == found.count("KeyError (what it says") == 3
    assert found.count("in broken") >= 3 and "internal_error" not in found
    out = capfd.readouterr()
    assert word not in out.out + out.err
    if kind == "json":
        assert all(json.loads(line)["time"] for line in found.splitlines())
    else:
        assert not any(line.startswith("12:00:00") for line in found.splitlines())


# ---------------------------------------------------------------- the engine


def failing(llm: LLM, error: Exception, when: Callable[[Sequence[SequenceRows]], bool], m: pytest.MonkeyPatch) -> None:
    """Passes raise where this is true of their segments."""
    score = llm.target.score

    def broken(segments: Sequence[SequenceRows], **options: Any) -> torch.Tensor:
        if when(segments):
            raise error
        return score(segments, **options)

    m.setattr(llm.target, "score", broken)


CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: 12")


CUDA = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.thorough
@pytest.mark.parametrize(("error", "prompt"), [(CPU, True), (CPU, False), (MemoryError(), False), (CUDA, True)])
def test_out_of_memory_ends_who_needs_it_alone(
    own: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception, prompt: bool
) -> None:
    """Passes with a request beyond 120 tokens fail; they are made again for each by itself."""
    llm = toy_llm(max_batch=4)
    limit = 120

    def large(segments: Sequence[SequenceRows]) -> bool:
        return any(s.length + len(s.tokens) > limit for s in segments)

    failing(llm, error, large, monkeypatch)
    with running(llm) as (server, url), ThreadPoolExecutor(4) as pool:
        prompts = ["The fox", "The little river", "The wood"]
        big = "x y z" * 40 if prompt else "x y z" * 10

        def ask(text: str) -> str:
            return (
                client(url).completions.create(model="toy", prompt=text, max_tokens=80, temperature=0).choices[0].text
            )

        replies = {text: pool.submit(ask, text) for text in [big, *prompts]}
        with pytest.raises(openai.InternalServerError, match="ran out of memory") as caught:
            replies[big].result()
        assert caught.value.status_code == 503
        for text in prompts:
            assert replies[text].result() == own.generate(text, SamplingParams(max_new_tokens=80)).text
        until(lambda: idle(server))


def test_a_round_that_fails_ends_its_requests_and_not_the_server(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm("none")
    broken = threading.Event()
    failing(llm, ValueError("a defect"), lambda _: broken.is_set(), monkeypatch)
    with running(llm) as (_, url):
        broken.set()
        reply = web.post(f"{url}/v1/completions", json={"model": "toy", "prompt": "a"})
        assert reply.status_code == 500 and "a defect" not in reply.text
        assert web.get(f"{url}/health").status_code == 503
        broken.clear()
        works(url, own)
        assert web.get(f"{url}/health").status_code == 200
        assert figures(url)["vllm:request_success_total/error"] == 1


def test_gauges_follow_a_request_that_fails_before_its_first_token(site: tuple[Server, str], own: LLM) -> None:
    """A penalty so small that logits overflow: it fails in the verification of the prompt's row, and nothing drifts."""
    server, url = site
    for _ in range(2):
        reply = web.post(f"{url}/v1/completions", json={"model": "toy", "prompt": "Once", "repetition_penalty": 1e-45})
        assert reply.status_code >= 400
    until(lambda: idle(server))
    found = figures(url)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    works(url, own)


def test_a_drafter_that_fails_is_left_out(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, calls = toy_llm(), []

    def broken(*given: Any) -> Any:
        calls.append(given)
        raise RuntimeError("no draft today")

    monkeypatch.setattr(llm.draft, "propose", broken)
    with running(llm) as (_, url):
        works(url, own)
    assert len(calls) == 1, "it is asked, and after its failure not again for this request"


@pytest.mark.thorough
def test_a_long_prompt_lets_short_ones_pass(own: LLM) -> None:
    """It takes hundreds of chunks; who comes after it is done long before."""
    llm = toy_llm("none", chunk_size=8)
    with running(llm) as (_, url), ThreadPoolExecutor(2) as pool:
        ended: dict[str, float] = {}

        def ask(prompt: str) -> None:
            client(url).completions.create(model="toy", prompt=prompt, max_tokens=4, temperature=0)
            ended[prompt[:5]] = time.monotonic()

        long = pool.submit(ask, "abcde" * 700)
        until(lambda: llm.engine.busy)
        pool.submit(ask, "short").result()
        long.result()
        assert ended["short"] < ended["abcde"]


def test_what_is_our_own_fault_is_not_told_to_clients() -> None:
    found = api_error(RuntimeError("/etc/passwd"))
    assert found.status == 500 and "passwd" not in found.message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 70000}, "port is 70000"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"request_timeout": float("nan")}, "request_timeout is nan"),
        ({"log_format": "xml"}, "'xml'; it is text or json"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": "of a file\n"}, "api_key"),
        ({"api_key": "ключ"}, "api_key"),
        ({"host": ""}, "host is ''"),
        ({"served_name": " "}, "served_name is ' '"),
        ({"cors_origins": ("https://chat.example/",)}, "without a slash at the end"),
        ({"cors_origins": ("chat.example",)}, "scheme and host"),
    ],
)
def test_values_that_no_server_has_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        ServerConfig(**values)
    assert "ключ" not in caught.value.message and "of a file" not in caught.value.message  # a key is shown nowhere


def test_an_address_that_cannot_be_had_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="already in use; choose another --port"):
            Listening(ServerConfig(port=taken.getsockname()[1]))
    for host in ("nowhere.invalid", "203.0.113.1", "::ffff:ffff"):
        with pytest.raises(InputError, match=f"cannot listen at {host}:0"):
            Listening(ServerConfig(host=host, port=0))
    with pytest.raises(LoadError, match=r"nowhere\.jinja"):
        check(ServerConfig(port=0, chat_template=str(tmp_path / "nowhere.jinja")))
    check(ServerConfig(port=0))


# ---------------------------------------------------------------- the process


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    started: list[subprocess.Popen[str]] = []
    tokenizer = tiny_tokenizer()
    save_model(tmp_path / "toy", tiny_llama(max_position_embeddings=100_000), tokenizer)

    def start(*flags: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
        command = [*warm(), "-W", "ignore", "-m", "sakiyomi", "serve", *flags]
        command += ["--target", str(tmp_path / "toy"), "--compile", "false", "--port", "0"]
        run = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", env=os.environ | environment)
        started.append(run)
        assert run.stderr is not None
        for line in run.stderr:
            if found := re.search(r"serving \w+ at ([^\s\"]+)", line):
                assert line.startswith("{" if "json" in flags else "serving")
                return run, found[1]
        raise AssertionError("it never listened")

    yield start
    for run in started:
        run.kill()
        run.wait()
        assert run.stderr is not None
        run.stderr.close()


def test_told_to_stop_it_ends_in_good_order(process: Any) -> None:
    """Requests that end in time do, the others are told so; the process then ends by itself, with exit code 0."""
    run, url = process("--shutdown-timeout", "4", "--log-format", "json", SAKIYOMI_SERVED_NAME="toy")

    def lines(tokens: int, begun: threading.Event) -> list[str]:
        asked = ENDLESS | {"stream": True, "max_tokens": tokens}
        with web.stream("POST", f"{url}/v1/completions", json=asked, timeout=30) as reply:
            found = []
            for line in reply.iter_lines():
                found.append(line)
                begun.set()
            return [line for line in found if line]

    begun = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        short, endless = pool.submit(lines, 50, begun[0]), pool.submit(lines, 90_000, begun[1])
        assert all(event.wait(30) for event in begun)
        run.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(httpx.HTTPError):  # nobody is let in any more
            web.post(f"{url}/v1/completions", json=ENDLESS, timeout=2).raise_for_status()
        assert short.result()[-1] == "data: [DONE]"
        assert json.loads(endless.result()[-1].removeprefix("data: "))["error"]["code"] == "stopping"
    assert run.wait(20) == 0
    last = [json.loads(line) for line in run.stderr if line.startswith("{")]
    assert any("stopping" in line["message"] for line in last)
    assert [line["status"] for line in last if line.get("path") == "/v1/completions"] == [200, 200]


@pytest.mark.thorough
def test_flags_come_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServerConfig] = []
    exact: list[bool] = []

    def serve_one(model: Any, config: ServerConfig, listening: Any, say: Any) -> None:
        served.append(config)
        exact.append(model.exact)

    monkeypatch.setattr("sakiyomi.cli.serve._serve_one", serve_one)
    monkeypatch.setattr("sakiyomi.server.run.check", lambda config: None)
    monkeypatch.setattr("sakiyomi.server.run.Listening", contextlib.nullcontext)
    monkeypatch.setattr("sakiyomi.server.logs.set_up", lambda kind: None)
    file = tmp_path / "serve.toml"
    file.write_text(
        'served_name = "of-the-file"\nmax_queue = 3\nmax_n = 2\ncors_origins = ["http://a.example"]\n', encoding="utf-8"
    )
    environment = {"SAKIYOMI_SERVED_NAME": "toy", "SAKIYOMI_MAX_N": "5", "SAKIYOMI_CONFIG": str(file)}
    done = CliRunner().invoke(app, ["serve", "--max-n", "1", "--no-reuse"], env=environment)
    assert done.exit_code == 0, done.output
    expected = ServerConfig(served_name="toy", max_queue=3, max_n=1, cors_origins=("http://a.example",), reuse=False)
    assert served == [expected] and exact == [False]
    for arguments, others in ((["--exact"], {}), ([], {"SAKIYOMI_EXACT": "1"})):
        assert CliRunner().invoke(app, ["serve", *arguments], env=environment | others).exit_code == 0
    file.write_text("exact = true\n", encoding="utf-8")
    assert CliRunner().invoke(app, ["serve"], env=environment).exit_code == 0
    assert exact == [False, True, True, True]
    for text, words in (
        ("nonsense = 1", "sets 'nonsense'; known names: host, port"),
        ("max-queue = 1", "sets 'max-queue'; did you mean 'max_queue'?"),
        ("[server]\nport = 1", "sets 'server'"),
        ("= 1", "expected a TOML file"),
        ('port = "x"', "sets port = 'x'; expected a whole number"),
        ("port = true", "sets port = True; expected a whole number"),
        ("port = 8000.5", "sets port = 8000.5; expected a whole number"),
        ("reuse = 1", "sets reuse = 1; expected true or false"),
        ("target = [1]", "sets target = [1]; expected a list"),
        ("cors_origins = [1]", "expected a list"),
        ("max_n = 0", "max_n is 0"),
    ):
        file.write_text(text, encoding="utf-8")
        done = CliRunner().invoke(app, ["serve", "--config", str(file)])
        assert done.exit_code in (1, 2) and words in done.output and "Traceback" not in done.output, (text, done.output)
    file.write_text('request_timeout = 5\ncache = "streaming"\nkv_budget = 700\ncompile = false\n', encoding="utf-8")
    assert CliRunner().invoke(app, ["serve", "--config", str(file)]).exit_code == 0
    assert served[-1].request_timeout == 5.0
    for name, text, words in (
        ("MAX_N", "many", "SAKIYOMI_MAX_N is 'many'; expected a whole number"),
        ("REUSE", "maybe", "SAKIYOMI_REUSE is 'maybe'; expected on or off"),
        (
            "MAXQUEUE",
            "3",
            "SAKIYOMI_MAXQUEUE is set, and is no setting of any command; did you mean SAKIYOMI_MAX_QUEUE?",
        ),
    ):
        done = CliRunner().invoke(app, ["serve"], env={f"SAKIYOMI_{name}": text})
        assert words in done.output and (done.exit_code == 0) == (name == "MAXQUEUE")
    assert CliRunner().invoke(app, ["serve", "--config", "nowhere.toml"]).exit_code == 1
