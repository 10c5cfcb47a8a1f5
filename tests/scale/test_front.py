"""Several servers behind one front: a reply whose server dies goes on with the same text, names and numbers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sakiyomi.scale.front import make_front, merged_metrics
from sakiyomi.scale.in_process import Asked, InProcessServer, Part, unlimited
from sakiyomi.scale.routing import ranked
from sakiyomi.server.config import ServerConfig
from server_toys import toy_llm

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "Number one of", "max_tokens": 40, "temperature": 1, "n": 2, "logprobs": 2, "echo": True,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Say"}], "max_tokens": 60, "tools": [TOOL], "tool_choice": "required",
    },
    "/v1/responses": {"input": "Say", "max_output_tokens": 40, "seed": 5},
    "/v1/messages": {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 40, "stop_sequences": ["zq"]},
}  # fmt: skip


class Dead(Exception):
    pass


class Mortals:
    """Servers that die after some parts of a reply, so many times.

    Args:
        servers: by name.

    Attributes:
        deaths: parts of each reply that is not given whole; "end", "choice": those before the stream's end, or up to
            the end of a choice.
    """

    dead, busy = (Dead,), (BlockingIOError,)

    def __init__(self, servers: dict[str, InProcessServer]) -> None:
        self.servers = servers
        self.deaths: list[int | str] = []
        self.asked: list[str] = []
        self.fixed: int | None = None
        self.spoils = False

    async def ask(self, asked: Asked) -> AsyncGenerator[Part]:
        if self.fixed is not None:
            asked.relay.seed, asked.relay.created = self.fixed, 7
        after = self.deaths.pop(0) if self.deaths else 1 << 30
        name = ranked(asked.key, dict.fromkeys(self.servers, 0))[len(self.deaths) % len(self.servers)]
        self.asked.append(name)
        if self.spoils and asked.relay.given:
            first = asked.relay.given[0]
            asked.relay.given[0] = first._replace(tokens=tuple(token ^ 1 for token in first.tokens))
        async with aclosing(self.servers[name].events(asked)) as parts:
            async for part in parts:
                if after == 0 or (after == "end" and any(sent.choice < 0 for sent in part.sent)):
                    raise Dead
                yield part
                if isinstance(after, int):
                    after -= 1
                elif after == "choice" and any(sent.over for sent in part.sent):
                    raise Dead
        if after == 0:
            raise Dead

    async def figures(self) -> list[dict[str, Any]]:
        return [{"replica": n, "machine": "here", "pid": 1, **s.figures()} for n, s in self.servers.items()]


@pytest.fixture(scope="module")
def llms() -> Iterator[list[Any]]:
    yield [toy_llm(dtype="float32"), toy_llm(dtype="float32", draft="none")]


async def posted(replicas: Mortals, requests: list[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
    """Replies to requests, one after the other."""
    front = make_front(replicas, ServerConfig(max_body=1 << 20))
    transport = httpx.ASGITransport(front, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        return [await client.post(p, json=b) if b else await client.get(p) for p, b in requests]


async def behind(llms: list[Any], run: Any) -> Any:
    """What a coroutine gives that is called with servers."""
    servers = {f"s{i}": InProcessServer(llm, unlimited("toy")) for i, llm in enumerate(llms)}
    for server in servers.values():
        await server.__aenter__()
    try:
        return await run(Mortals(servers))
    finally:
        for server in servers.values():
            await server.__aexit__()


def said(data: str) -> list[Any]:
    """Objects of events without what depends on how fast rounds were."""
    found = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    for one in found:
        for part in (one, one.get("response") or {}):
            part.pop("usage", None)
            part.pop("completed_at", None)
    return found


def content(data: str) -> dict[Any, list[Any]]:
    """What a stream says, whatever its rounds were: of each choice joined texts, calls, ends; ids."""
    found: dict[Any, list[Any]] = {"ids": [], "ends": []}
    for one in said(data):
        found["ids"].append(one.get("id") or one.get("item_id") or (one.get("response") or {}).get("id"))
        for choice in one.get("choices", []):
            delta = choice.get("delta", choice)
            found.setdefault(choice["index"], [""])[0] += delta.get("text") or delta.get("content") or ""
            found[choice["index"]] += delta.get("tool_calls") or []
            found["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            if choice.get("logprobs"):
                found.setdefault("tokens", []).extend((choice["index"], t) for t in choice["logprobs"]["tokens"])
        if isinstance(one.get("delta"), str):
            found.setdefault("text", [""])[0] += one["delta"]
        if one.get("type") == "content_block_delta":
            found.setdefault("text", [""])[0] += one["delta"].get("text", "") + one["delta"].get("partial_json", "")
        if one.get("type", "").endswith((".done", ".completed", ".incomplete", "stop", "message_delta")):
            found["ends"].append(one)
    numbers = [one["sequence_number"] for one in said(data) if "sequence_number" in one]
    assert numbers == list(range(len(numbers)))
    found["ids"] = sorted(set(map(str, found["ids"])))
    for end in found["ends"]:
        if isinstance(end, dict):
            end.pop("sequence_number", None)
    found["tokens"] = sorted(map(str, found.get("tokens", [])))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("path", BODIES)
def test_streams_outlive_their_servers(path: str, llms: list[Any]) -> None:
    """Two deaths a stream, anywhere and at ends: text, calls, log probabilities, ids and sequence numbers go on."""
    body = BODIES[path] | {"stream": True}
    draws = random.Random(path)

    async def run(replicas: Mortals) -> tuple[str, list[str]]:
        replicas.fixed = 11
        (right,) = await posted(replicas, [(path, body)])
        assert right.status_code == 200 and len(right.text) > 200, right.text
        found = []
        anywhere = [[draws.randrange(0, 14), draws.randrange(0, 10)] for _ in range(6)]
        for deaths in [*anywhere, ["end", "end"], ["choice", "choice"], [3, "end"]]:
            replicas.deaths = [*deaths]
            (reply,) = await posted(replicas, [(path, body)])
            found.append(reply.text)
        assert len(replicas.asked) > 8, "servers died"
        return right.text, found

    right, found = asyncio.run(behind(llms, run))
    for text in found:
        assert '"error"' not in text.replace('"error":null', ""), text[-600:]
        assert content(text) == content(right)


@pytest.mark.thorough
def test_whole_replies_outlive_their_servers(llms: list[Any]) -> None:
    body = {"prompt": "Number one of", "max_tokens": 20, "temperature": 1}

    async def run(replicas: Mortals) -> list[str]:
        replicas.fixed = 3
        texts = []
        for deaths in ([], [0], [0, 0], [1]):
            replicas.deaths = deaths
            (reply,) = await posted(replicas, [("/v1/completions", body)])
            texts.append(reply.json()["choices"][0]["text"])
        return texts

    assert len(set(asyncio.run(behind(llms, run)))) == 1


def test_three_deaths_are_an_error_and_so_is_another_text(llms: list[Any]) -> None:
    """A text that is not what was sent is never joined to it."""
    body = {"prompt": "Number one of", "max_tokens": 20, "temperature": 0, "ignore_eos": True}

    async def run(replicas: Mortals) -> None:
        replicas.deaths = [0, 0, 0]
        (dead,) = await posted(replicas, [("/v1/completions", body)])
        assert dead.status_code == 502 and dead.json()["error"]["code"] == "replica_died"
        replicas.deaths = [2, 1, 1]
        (cut,) = await posted(replicas, [("/v1/completions", body | {"stream": True})])
        assert "replicas died" in cut.text and "[DONE]" not in cut.text
        replicas.deaths, replicas.spoils = [2], True
        (other,) = await posted(replicas, [("/v1/completions", body | {"stream": True})])
        assert "in what was given" in other.text and "[DONE]" not in other.text

    asyncio.run(behind(llms, run))


def test_requests_are_read_in_front(llms: list[Any]) -> None:
    """What is no request costs no server anything; errors are those of the server."""

    async def run(replicas: Mortals) -> list[httpx.Response]:
        found = await posted(
            replicas,
            [
                ("/v1/completions", {"prompt": 3}),
                ("/v1/chat/completions", {"messages": [], "beams": 3}),
                ("/v1/nothing", {"a": 1}),
            ],
        )
        assert not replicas.asked
        return found + await posted(
            replicas,
            [
                ("/v1/completions", {"prompt": "x", "model": "nobody"}),
                ("/tokenize", {"prompt": "Number"}),
                ("/v1/embeddings", {"input": ["Number", "one"]}),
                *(
                    (path, {})
                    for path in ("/v1/models", "/v1/models/nobody", "/health", "/metrics", "/replicas", "/", "/docs")
                ),
            ],
        )

    found = asyncio.run(behind(llms, run))
    assert [reply.status_code for reply in found] == [400, 400, 404, 404, 200, 200, 200, 404, 200, 200, 200, 200, 200]
    assert len(found[5].json()["data"]) == 2 and "/v1/embeddings" in found[12].text
    assert found[8].json()["replicas"] == 2 and "<td>s1" in found[10].text
    samples = [s for family in text_string_to_metric_families(found[9].text) for s in family.samples]
    assert {sample.labels["replica"] for sample in samples} == {"s0", "s1"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_slot(stream: bool, llms: list[Any]) -> None:
    body = {"prompt": "Number one of", "max_tokens": 4000, "ignore_eos": True, "stream": stream}

    async def run(replicas: Mortals) -> None:
        front = make_front(replicas, ServerConfig(max_body=1 << 20))
        transport = Leaving(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            asking = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await busy(replicas, 1)
            assert not asking.done()
            transport.left.set()
            await busy(replicas, 0)
            asking.cancel()

    asyncio.run(behind(llms, run))


async def busy(replicas: Mortals, count: int) -> None:
    """Wait until so many requests run."""
    async with asyncio.timeout(20):
        while sum(one["running"] for one in await replicas.figures()) != count:
            await asyncio.sleep(0.01)


class Leaving(httpx.ASGITransport):
    """A connection that is dropped when it is told to."""

    def __init__(self, app: Any) -> None:
        self.left = asyncio.Event()

        async def dropped(scope: Any, receive: Any, send: Any) -> None:
            coming = True

            async def receives() -> Any:
                nonlocal coming
                if not coming:
                    await self.left.wait()
                    return {"type": "http.disconnect"}
                message = await receive()
                coming = message.get("more_body", False)
                return message

            await app(scope, receives, send)

        super().__init__(dropped, raise_app_exceptions=True)


def test_merged_metrics() -> None:
    page = '# HELP a b\n# TYPE a gauge\na{x="1"} 2.0\n'
    lines = merged_metrics({"r": page, "s": page}).decode().splitlines()
    assert lines == ["# HELP a b", "# TYPE a gauge", 'a{replica="r",x="1"} 2.0', 'a{replica="s",x="1"} 2.0']
