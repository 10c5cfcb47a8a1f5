"""Tells routers which prefixes the KV cache holds, as vLLM's KV events, so that they can send prompts to a cached one.

A message has three frames: the topic, its number (8 bytes, big-endian), and msgpack of [time, events, rank]. Events are
arrays that begin with their name, as vLLM's are: BlockStored, BlockRemoved, AllBlocksCleared. A block stands for 16
tokens and all tokens before them. It is listed while any slot holds it, so that another request could reuse it.
"""

from __future__ import annotations

import hashlib
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from sakiyomi.core.errors import InputError, LoadError

BLOCK = 16  # tokens
KEPT = 10_000  # messages that can be replayed
PAUSE = 0.05  # seconds between checks for replay requests
END = (-1).to_bytes(8, "big", signed=True)  # number of the message that ends a replay

Held = tuple[object, Sequence[int], int]
"""Holder of tokens (one object per growing text), the tokens, and how many of them are cached."""


class Blocks:
    """The blocks in the cache; gives their changes."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._chains: dict[int, tuple[object, list[int]]] = {}
        self._state: list[tuple[int, int]] = []

    def update(self, held: Iterable[Held]) -> list[list[Any]]:
        """Events for the difference between the last call and this one."""
        now = [(holder, tokens, count // BLOCK) for holder, tokens, count in held]
        state = [(id(holder), count) for holder, _, count in now]
        if state == self._state:
            return []
        self._state = state
        events: list[list[Any]] = []
        chains: dict[int, tuple[object, list[int]]] = {}
        found: set[int] = set()
        for holder, tokens, count in now:
            # Keep the holder with its chain, so that no other object gets its id.
            _, chain = chains[id(holder)] = self._chains.get(id(holder), (holder, []))
            del chain[count:]
            for number in range(len(chain), count):
                block = tokens[number * BLOCK : (number + 1) * BLOCK]
                chain.append(_hash(chain[-1] if chain else 0, block))
            fresh = [number for number in range(count) if chain[number] not in self._known | found]
            if fresh:  # a block's hash covers all before it, so the new ones are the last ones
                first = fresh[0]
                parent = chain[first - 1] if first else None
                ids = list(tokens[first * BLOCK : count * BLOCK])
                events.append(["BlockStored", chain[first:], parent, ids, BLOCK, None, None, None])
            found.update(chain)
        if gone := self._known - found:
            events.append(["BlockRemoved", sorted(gone), None])
        self._known, self._chains = found, chains
        return events


def _hash(parent: int, tokens: Sequence[int]) -> int:
    """Hash of a block and all before it: 63 bits, which fit a signed integer of every reader."""
    data = struct.pack(f"={len(tokens) + 1}q", parent, *tokens)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


class EventPublisher:
    """Publishes events, in a thread of its own.

    Args:
        address: ZeroMQ address to publish at, for instance tcp://*:5557.
        replay: address where earlier messages can be asked for; None: nowhere.
        topic: of all messages.

    Attributes:
        addresses: where it listens, for events and for replays; a port * is replaced by the free one that was taken.

    Raises:
        LoadError: msgpack or pyzmq is not installed.
        InputError: it cannot listen at an address.
    """

    def __init__(self, address: str, replay: str | None = None, topic: str = "") -> None:
        try:
            import msgpack
            import zmq
        except ImportError as error:
            raise LoadError(
                f"kv_events need {error.name}, which is not installed; pip install 'sakiyomi[events]'"
            ) from None
        self._encode, self._again, self._topic = msgpack.packb, zmq.Again, topic.encode()
        self._context = zmq.Context()
        self._sockets = [self._bound(zmq.PUB, address)] + ([] if replay is None else [self._bound(zmq.ROUTER, replay)])
        self.addresses = [str(socket.last_endpoint.decode()) for socket in self._sockets]
        self._blocks = Blocks()
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, address: str) -> Any:
        import zmq

        socket = self._context.socket(kind)
        socket.linger = 0
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy()
            advice = "choose another port" if error.errno == zmq.EADDRINUSE else "expected tcp://HOST:PORT"
            raise InputError(
                f"kv_events cannot be sent at {address!r}: {zmq.strerror(error.errno)}; {advice}"
            ) from None
        return socket

    def update(self, held: Iterable[Held]) -> None:
        """Send what has changed."""
        if events := self._blocks.update(held):
            self._waiting.put(self._encode([time.time(), events, 0]))

    def close(self) -> None:
        """Send waiting events, and stop."""
        self._waiting.put(None)
        self._thread.join()
        self._context.destroy()

    def _run(self) -> None:
        number = 0
        while True:
            try:
                data = self._waiting.get(timeout=PAUSE)
                if data is None:
                    return
                frame = number.to_bytes(8, "big")
                number += 1
                self._sent.append((frame, data))
                self._sockets[0].send_multipart([self._topic, frame, data])
            except queue.Empty:
                pass
            for socket in self._sockets[1:]:
                self._repeat(socket)

    def _repeat(self, socket: Any) -> None:
        """Answer a request for the messages from a number on."""
        import zmq

        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except self._again:
            return
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        for frame, data in list(self._sent):
            if frame >= frames[2]:
                socket.send_multipart([frames[0], b"", frame, data])
        socket.send_multipart([frames[0], b"", END, b""])
