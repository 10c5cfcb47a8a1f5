"""Streams that come from a replica's process by a socket: each message of Ray's costs both sides about a millisecond.

Ray still starts and ends a request, and knows of deaths; what comes behind the first event of a stream is sent here. A
frame has two lengths, a JSON list (which tokens its events have), and bytes of events; an empty one is the last. A line
is opened by the replica, with the secret that the request came with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from sakiyomi.scale.in_process import Part
from sakiyomi.server.relay import Sent

__all__ = ["Address", "Dialer", "Line", "Lines"]

SECRET = 16  # bytes
PATIENCE = 5.0  # seconds that a line may take to be there, and Ray to notice why it is cut off
DIALING = 1.0  # seconds until a front counts as unreachable
_HEAD = struct.Struct(">II")


class Address(NamedTuple):
    """Where the rest of a stream is wanted.

    Attributes:
        host, port: of the front's machine.
        secret: of this stream alone.
    """

    host: str
    port: int
    secret: bytes


class Line:
    """One stream, where it is read.

    Args:
        address: what its replica is told.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.there: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

    async def parts(self, watched: asyncio.Future[object], first: Part) -> AsyncGenerator[Part]:
        """What comes behind the first part.

        Args:
            watched: raises if the replica dies, however the machine tells of it.
            first: has status and headers.

        Raises:
            ConnectionError: it is cut off, or nobody opened it.
        """
        either: set[asyncio.Future[Any]] = {self.there, watched}
        await asyncio.wait(either, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        if not self.there.done():
            raise (watched.done() and watched.exception()) or ConnectionError("a stream was announced and did not come")
        reader, _ = self.there.result()

        def dies(watched: asyncio.Future[object]) -> None:
            if not watched.cancelled() and (error := watched.exception()) is not None:
                reader.set_exception(error)  # type: ignore[arg-type]

        watched.add_done_callback(dies)
        try:
            while True:
                of_sent, of_data = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                if not of_sent + of_data:
                    return
                text, data = await reader.readexactly(of_sent), await reader.readexactly(of_data)
                sent = [Sent(choice, tuple(tokens), over) for choice, tokens, over in json.loads(text)]
                yield Part(first.status, first.headers, data, sent)
        except (asyncio.IncompleteReadError, ConnectionError):
            await asyncio.wait({watched}, timeout=PATIENCE)  # asked again sooner, Ray would name the dead one again
            raise (watched.done() and watched.exception()) or ConnectionError("a stream was cut off") from None


class Lines:
    """Where a front's streams come in.

    Args:
        host: address of this machine that the replicas can connect to.
    """

    def __init__(self, host: str) -> None:
        self._host, self._port = host, 0
        self._awaited: dict[bytes, Line] = {}

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Takes streams while the block runs."""
        server = await asyncio.start_server(self._take, self._host, 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            self._port = 0
            server.close()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Line | None]:
        """One stream may come while the block runs; None: nobody listens."""
        if not self._port:
            yield None
            return
        line = Line(Address(self._host, self._port, secrets.token_bytes(SECRET)))
        self._awaited[line.address.secret] = line
        try:
            yield line
        finally:
            self._awaited.pop(line.address.secret, None)
            if line.there.done():
                line.there.result()[1].close()
            line.there.cancel()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, OSError):
            async with asyncio.timeout(PATIENCE):
                line = self._awaited.pop(await reader.readexactly(SECRET), None)
            if line is not None:
                line.there.set_result((reader, writer))
                return
        writer.close()


class _Sender:
    """One stream, where it is written."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send(self, part: Part) -> None:
        """One part; waits where the reader is behind."""
        sent = json.dumps(part.sent, separators=(",", ":")).encode()
        self._writer.write(b"".join((_HEAD.pack(len(sent), len(part.data)), sent, part.data)))
        await self._writer.drain()

    async def end(self) -> None:
        """All was sent."""
        self._writer.write(_HEAD.pack(0, 0))
        await self._writer.drain()


class Dialer:
    """Opens lines to fronts. One that was unreachable is not tried again, or each stream would wait for it."""

    def __init__(self) -> None:
        self._beyond: set[tuple[str, int]] = set()

    @asynccontextmanager
    async def opened(self, address: Address | None) -> AsyncIterator[_Sender | None]:
        """A line; None where there is none, and parts have to take Ray's way."""
        writer: asyncio.StreamWriter | None = None
        if address is not None and address[:2] not in self._beyond:
            try:
                async with asyncio.timeout(DIALING):
                    _, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(address.secret)
            except (OSError, TimeoutError):
                self._beyond.add(address[:2])
        try:
            yield None if writer is None else _Sender(writer)
        finally:
            if writer is not None:
                writer.close()
