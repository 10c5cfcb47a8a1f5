"""KV events: a listener that keeps them knows which prefixes the server has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from processes import until
from sakiyomi import InputError
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.kv_events import BLOCK, Blocks, EventPublisher
from sakiyomi.server.run import check
from server_toys import client, figures, running, toy_llm

zmq = pytest.importorskip("zmq", reason="needs the extra events")
msgpack = pytest.importorskip("msgpack", reason="needs the extra events")


class Index:
    """What a router makes of events."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def take(self, events: Sequence[Sequence[Any]]) -> None:
        for event in events:
            if event[0] == "BlockStored":
                _, hashes, parent, tokens, size, *_ = event
                assert len(tokens) == size * len(hashes) and size == BLOCK
                assert parent is None or parent in self.blocks, "an event tells of a block before its parent"
                for i, name in enumerate(hashes):
                    assert name not in self.blocks, "told of twice"
                    self.blocks[name] = parent, tuple(tokens[i * size : (i + 1) * size])
                    parent = name
            else:
                assert event[0] == "BlockRemoved"
                for name in event[1]:
                    del self.blocks[name]

    def prefixes(self) -> set[tuple[int, ...]]:
        """Tokens from the first on, of every block."""

        def whole(name: int | None) -> tuple[int, ...]:
            return () if name is None else whole(self.blocks[name][0]) + self.blocks[name][1]

        return {whole(name) for name in self.blocks}


def prefixes(held: Sequence[tuple[object, Sequence[int], int]]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for _, tokens, count in held for end in range(BLOCK, count + 1, BLOCK)}


FREE = "tcp://127.0.0.1:*"


def test_blocks_follow_whatever_is_held() -> None:
    """Texts that grow, share beginnings, end and are forgotten."""
    draws = random.Random(1)
    blocks, index = Blocks(), Index()
    texts: list[tuple[object, list[int], int]] = []
    for _ in range(400):
        choice = draws.random()
        if choice < 0.3 or not texts:
            other = draws.choice(texts)[1] if texts and draws.random() < 0.7 else []
            texts.append((object(), other[: draws.randrange(len(other) + 1)], 0))
        elif choice < 0.4:
            texts.pop(draws.randrange(len(texts)))
        else:
            at = draws.randrange(len(texts))
            holder, tokens, _ = texts[at]
            tokens += [draws.randrange(3) for _ in range(draws.randrange(40))]
            texts[at] = holder, tokens, draws.randrange(len(tokens) + 1)
        index.take(blocks.update(texts))
        assert index.prefixes() == prefixes(texts)


def test_a_server_tells_what_it_holds() -> None:
    """Who keeps all messages knows in the end what is there."""
    llm = toy_llm(draft="none", max_batch=2)
    context = zmq.Context()
    try:
        with running(llm, kv_events=FREE, kv_events_topic="kv@me") as (server, url):
            asked = client(url)
            cached = []
            for text in ("the first text of all " * 5, "the first text of all " * 5 + "goes on", "another " * 20):
                reply = asked.completions.create(model="toy", prompt=text, max_tokens=20, temperature=0)
                cached.append(reply.usage.prompt_tokens_details.cached_tokens)
            assert cached[0] == 0 and cached[1] >= 64
            info = next(name for name in figures(url) if name.startswith("vllm:cache_config_info"))
            assert info.split("/")[1] == str(BLOCK)
            index = Index()
            assert server.events is not None
            server.events.close()  # all is sent now
            sent = [(int.from_bytes(number, "big"), data) for number, data in server.events._sent]
            assert [number for number, _ in sent] == list(range(len(sent))) and sent
            for _, data in sent:
                moment, events, rank = msgpack.unpackb(data)
                assert moment > 0 and rank == 0
                index.take(events)
            assert index.prefixes() == prefixes(llm.engine.reusable())
    finally:
        context.destroy(linger=0)


def test_messages_arrive_and_are_repeated() -> None:
    context = zmq.Context()
    with pytest.raises(InputError, match="kv_events cannot be sent at 'nowhere'"):
        EventPublisher("nowhere")
    publisher = EventPublisher(FREE, FREE, "topic")
    ports = publisher.addresses
    with pytest.raises(InputError, match="in use; choose another port"):  # before a model is loaded
        check(ServerConfig(port=0, kv_events=ports[0]))
    listener, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        listener.subscribe(b"topic")
        listener.rcvtimeo = asker.rcvtimeo = 20_000
        listener.connect(ports[0])
        asker.connect(ports[1])
        text: list[int] = []
        holder = object()

        def grow() -> bool:
            text.extend(range(BLOCK))
            publisher.update([(holder, text, len(text))])
            return bool(listener.poll(50))

        until(grow)
        topic, number, data = listener.recv_multipart()
        assert topic == b"topic" and msgpack.unpackb(data)[1][0][0] == "BlockStored"
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
        repeated = []
        while (found := asker.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
            repeated.append((found[1], found[2]))
        assert (number, data) in repeated and [int.from_bytes(n, "big") for n, _ in repeated] == list(
            range(len(repeated))
        )
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_what_cannot_be_told() -> None:
    with pytest.raises(InputError, match="give its address"):
        ServerConfig(kv_events_topic="x")
    with pytest.raises(InputError, match="reuse is off"):
        ServerConfig(kv_events="tcp://*:5557", reuse=False)
