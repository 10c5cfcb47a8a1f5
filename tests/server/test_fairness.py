"""One client cannot stop the others: turns by client, shares of the queue, limits before work is done."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from processes import until
from sakiyomi import LLM, SamplingParams
from sakiyomi.core.params import SamplingParams as Params
from sakiyomi.server.app import Server
from sakiyomi.server.jobs import Call, Job
from sakiyomi.server.worker import Turns
from server_toys import bombs, client, figures, running, toy_llm, web

LONG: dict[str, Any] = {"model": "toy", "prompt": "Once", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Server, str]]:
    with running(toy_llm(max_batch=2), max_queue=6, api_key="a,b,c", header_timeout=0.5, max_connections=40) as found:
        yield found


def job(client: str, call: Call | None = None) -> Job:
    made = Job([1], Params(), client=client)
    made.call = call or Call([made], lambda jobs: None)
    return made


# ---------------------------------------------------------------- turns


def test_the_next_slot_is_of_the_client_who_has_fewest() -> None:
    turns = Turns()
    many, one = [job("a") for _ in range(5)], job("b")
    for waiting in (*many, one):
        turns.add(waiting)
    assert [turns.next() for _ in range(3)] == [many[0], one, many[1]]
    turns.leave(many[0])
    turns.leave(many[0])  # once more changes nothing
    assert turns.running == 2 and len(turns) == 3
    turns.leave(many[2])  # cancelled while it waits
    assert turns.next() is many[3]


def test_requests_of_one_client_share_too() -> None:
    turns = Turns()
    call = Call([], lambda jobs: None)
    samples, other = [job("a", call) for _ in range(4)], job("a")
    for waiting in (*samples, other):
        turns.add(waiting)
    assert [turns.next() for _ in range(3)] == [samples[0], other, samples[1]]


def test_nothing_is_kept_of_who_has_left() -> None:
    turns = Turns()
    for name in "abc":
        turns.add(job(name))
    gone = [turns.next() for _ in range(3)]
    for one in gone:
        turns.leave(one)
    assert not turns._waiting and not turns._running and not turns.running


def hold(url: str, key: str, count: int, stop: threading.Event) -> list[threading.Thread]:
    """So many long requests of a key, each read until `stop`."""

    def read() -> None:
        headers = {"authorization": f"Bearer {key}"}
        with web.stream(
            "POST", f"{url}/v1/completions", json=LONG | {"stream": True}, headers=headers, timeout=60
        ) as reply:
            for _ in reply.iter_lines():
                if stop.is_set():
                    return

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.thorough
def test_a_client_with_few_requests_passes_one_with_many(site: tuple[Server, str], own: LLM) -> None:
    server, url = site
    stop = threading.Event()
    threads = hold(url, "a", 5, stop)
    try:
        until(lambda: server.worker.load == 5)
        ended: list[float] = []
        other = threading.Thread(target=lambda: hold(url, "a", 1, stop)[0].join() or ended.append(time.monotonic()))  # type: ignore[func-returns-value]
        other.start()
        until(lambda: server.worker.load == 6)
        reply = client(url, api_key="b").completions.create(model="toy", prompt="The fox", max_tokens=12, temperature=0)
        assert reply.choices[0].text == own.generate("The fox", SamplingParams(max_new_tokens=12)).text
        assert not ended, "it waited for those of the other client that had come before"
    finally:
        stop.set()
        for thread in (*threads, other):
            thread.join()
    until(lambda: server.worker.load == 0)


@pytest.mark.thorough
def test_a_full_queue_has_room_for_who_has_less(site: tuple[Server, str]) -> None:
    server, url = site
    stop = threading.Event()
    threads = hold(url, "a", 7, stop)
    headers = {"authorization": "Bearer a"}
    newest: list[httpx.Response] = []

    def wait() -> None:
        newest.append(web.post(f"{url}/v1/completions", json=LONG | {"stream": True}, headers=headers, timeout=60))

    try:
        until(lambda: server.worker.load == 7)
        threads.append(threading.Thread(target=wait))
        threads[-1].start()
        until(lambda: server.worker.load == 8)  # two run, six wait: full
        again = web.post(f"{url}/v1/completions", json=LONG, headers=headers)
        assert again.status_code == 429  # it has most of all: nobody makes room for it
        before = refused(url)
        reply = client(url, api_key="b").completions.create(model="toy", prompt="The fox", max_tokens=3)
        assert reply.choices[0].finish_reason
        assert refused(url) == before + 1
        threads[-1].join()
        assert newest[0].status_code == 429 and int(newest[0].headers["retry-after"]) >= 1
        assert newest[0].json()["error"]["code"] == "queue_full", "a stream that has not begun is refused as a whole"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    until(lambda: server.worker.load == 0)


def refused(url: str) -> float:
    return figures(url, authorization="Bearer a").get("sakiyomi:requests_refused_total", 0.0)


# ---------------------------------------------------------------- limits before work


@pytest.mark.parametrize("prompt", ["a" * 700_000, [5] * 300_000], ids=["text", "ids"])
def test_what_is_too_long_is_refused_before_it_is_tokenized(
    own: LLM, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    with running(own) as (server, url):
        monkeypatch.setattr("sakiyomi.server.bodies.prompt_tokens", lambda *_: pytest.fail("it was tokenized"))
        began = time.monotonic()
        reply = web.post(f"{url}/v1/completions", json={"model": "toy", "prompt": prompt}, timeout=30)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
        assert time.monotonic() - began < 5
        assert server.max_body == 1 << 20  # more than the context can take is not even read
        assert web.post(f"{url}/v1/completions", content=b" " * 1_100_000).status_code == 413


def test_long_bodies_are_read_in_a_lane_of_their_own(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever long one takes time to read, short ones pass it."""
    from sakiyomi.server import bodies

    slow, release = threading.Event(), threading.Event()
    real = bodies.prompt_tokens

    def tokens(prompt: Any, *rest: Any) -> list[int]:
        if len(prompt) > bodies.LONG:
            slow.set()
            release.wait(20)
        return real(prompt, *rest)

    monkeypatch.setattr(bodies, "prompt_tokens", tokens)
    with running(own) as (server, url):
        server.bodies._longest = 1000
        text = {"model": "toy", "prompt": "a" * 40_000}
        threads = [
            threading.Thread(target=lambda: web.post(f"{url}/v1/completions", json=text, timeout=60)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        assert slow.wait(20)
        reply = client(url).completions.create(model="toy", prompt="The fox", max_tokens=3)
        assert reply.choices[0].finish_reason and not release.is_set()
        release.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("ids", [[1.0, 2.0], [1, 2]])
def test_whole_numbers_may_be_written_as_floats(own: LLM, ids: list[float]) -> None:
    with running(own) as (_, url):
        reply = web.post(f"{url}/v1/completions", json={"model": "toy", "prompt": ids, "max_tokens": 2})
        assert reply.status_code == 200, reply.text


@pytest.mark.thorough
def test_more_biases_than_tokens_are_refused(own: LLM) -> None:
    with running(own) as (_, url):
        biases = {f"{i:05d}": 1.0 for i in range(20_000)}
        reply = web.post(f"{url}/v1/completions", json={"model": "toy", "prompt": "a", "logit_bias": biases})
        assert reply.status_code == 400 and "20000 entries" in reply.json()["error"]["message"]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", bombs())
def test_a_grammar_bomb_is_served_or_refused_and_holds_up_nobody(own: LLM, kind: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": bombs()[kind]}}
    with running(toy_llm("none", max_batch=2)) as (_, url):
        found: list[int] = []

        def ask() -> None:
            body = {"model": "toy", "prompt": "a", "max_tokens": 8, "response_format": form}
            found.append(web.post(f"{url}/v1/completions", json=body, timeout=120).status_code)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        reply = client(url).completions.create(model="toy", prompt="The fox", max_tokens=12, temperature=0)
        assert reply.choices[0].text == own.generate("The fox", SamplingParams(max_new_tokens=12)).text
        assert time.monotonic() - began < 20
        for thread in threads:
            thread.join()
        assert set(found) <= {200, 400}


@pytest.mark.thorough
def test_tools_of_a_megabyte_are_served_or_refused(own: LLM) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "description": "x" * 900_000}},
    }
    with running(own) as (_, url):
        body = {"model": "toy", "messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 4}
        reply = web.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


# ---------------------------------------------------------------- connections


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def ended(connection: socket.socket) -> bytes:
    """All that came until the server closed it."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionError:
        pass
    return found


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_half_a_header_is_not_waited_for(site: tuple[Server, str], sent: bytes) -> None:
    with connect(site[1]) as connection:
        began = time.monotonic()
        connection.sendall(sent)
        assert ended(connection).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began < 3


def test_half_a_header_after_a_request_is_not_waited_for(site: tuple[Server, str]) -> None:
    with connect(site[1]) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /heal")
        assert b"HTTP/1.1 408" in ended(connection)


def test_one_address_holds_half_of_the_connections(site: tuple[Server, str], own: LLM) -> None:
    time.sleep(0.7)
    held = [connect(site[1]) for _ in range(25)]
    try:
        held[24].settimeout(5)
        assert ended(held[24]).startswith(b"HTTP/1.1 503")
    finally:
        for one in held:
            one.close()
    until(lambda: web.get(f"{site[1]}/health").status_code == 200)


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(site: tuple[Server, str]) -> None:
    body = b"5\r\nhello\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    head = ["POST /v1/completions HTTP/1.1", "host: x", "content-length: 5", "transfer-encoding: chunked", "", ""]
    with connect(site[1]) as connection:
        connection.sendall("\r\n".join(head).encode() + body)
        reply = ended(connection)
    assert reply.startswith(b"HTTP/1.1 400") and reply.count(b"HTTP/1.1") == 1


# ---------------------------------------------------------------- sums


@pytest.mark.thorough
def test_sums_of_metrics_are_those_of_the_replies(own: LLM) -> None:
    """Whatever ends a request, each is counted once, and nothing runs or waits afterwards."""
    import random

    rng = random.Random(0)
    kinds = ["whole", "stream", "dropped", "penalty", "n", "refused"]
    counted = {"tokens": 0, "ended": 0}
    with running(toy_llm("none", max_batch=2), max_queue=50) as (server, url):

        def ask(number: int) -> None:
            kind = kinds[number % len(kinds)]
            body = {"model": "toy", "prompt": f"{number} x", "max_tokens": rng.choice([1, 3, 8]), "ignore_eos": True}
            if kind == "whole":
                usage = web.post(f"{url}/v1/completions", json=body).json()["usage"]
                counted["tokens"] += usage["completion_tokens"]
                counted["ended"] += 1
            elif kind == "stream":
                more = {"stream": True, "stream_options": {"include_usage": True}}
                lines = web.post(f"{url}/v1/completions", json=body | more).text.split("\n")
                usage = json.loads([line for line in lines if '"usage":{' in line][-1][6:])["usage"]
                counted["tokens"] += usage["completion_tokens"]
                counted["ended"] += 1
            elif kind == "dropped":
                with web.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as reply:
                    next(reply.iter_lines())
                counted["ended"] += 1
            elif kind == "penalty":  # fails before its first token
                web.post(f"{url}/v1/completions", json=body | {"repetition_penalty": 1e-45})
                counted["ended"] += 1
            elif kind == "n":
                usage = web.post(f"{url}/v1/completions", json=body | {"n": 3}).json()["usage"]
                counted["tokens"] += usage["completion_tokens"]
                counted["ended"] += 3
            else:
                web.post(f"{url}/v1/completions", json=body | {"nonsense": 1})

        for number in range(120):
            ask(number)
        until(lambda: server.worker.load == 0 and not server.llm.engine.busy)
        found = figures(url)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert (
        sum(value for name, value in found.items() if name.startswith("vllm:request_success_total")) == counted["ended"]
    )
    dropped = found["vllm:generation_tokens_total"] - counted["tokens"]
    assert 0 <= dropped <= 20 * 1500


def test_acceptance_that_fell_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Beside the tau of the time when the draft was chosen; without one nothing is said."""
    from types import SimpleNamespace
    from typing import cast

    from sakiyomi.core.drops import WINDOW, Tau
    from sakiyomi.core.outputs import Step
    from sakiyomi.server.jobs import Job
    from sakiyomi.server.metrics import Metrics

    def counted(chosen: Tau | None) -> str:
        metrics = Metrics("toy", chosen)
        job = SimpleNamespace(request=SimpleNamespace(stats=SimpleNamespace(drafted=0)), first=True, last=0.0)
        job.drafted_before = 0
        for number in range(2 * WINDOW):
            trace = [SimpleNamespace(source="target", status="plain")] * (1 + number % 3)
            step = SimpleNamespace(token_ids=[1] * len(trace), trace=trace, finish_reason=None)
            metrics.step(cast(Job, job), cast(Step, step), 1.0)
        return metrics.page().decode()

    page = counted(Tau(3.0, 0.01))
    for line in ("tau_recent", "tau_chosen"):
        assert f'sakiyomi:{line}{{model_name="toy"}}' in page
    assert 'sakiyomi:acceptance_fell{model_name="toy"} 1.0' in page
    assert "tau is 2.00, and was 3.00" in caplog.text
    caplog.clear()
    assert 'sakiyomi:acceptance_fell{model_name="toy"} 0.0' in counted(Tau(2.0, 0.01))
    assert "acceptance_fell" not in counted(None)
    assert not caplog.text
