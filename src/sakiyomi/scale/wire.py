"""Sends streams from a replica to the front by a socket, since each message of Ray costs about a millisecond per side.

Ray still starts and ends requests, and reports dead replicas; the events of a stream after the first one are sent here.
A frame has two lengths, a JSON list of the tokens in its events, and the bytes of the events; an empty frame is the
last. The replica opens a line with the secret that came with the request.
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

SECRET = 16  # bytes
PATIENCE = 5.0  # seconds for a line to open, and for Ray to report why it was cut off
DIALING = 1.0  # seconds until a front counts as unreachable
_HEAD = struct.Struct(">II")


class Address(NamedTuple):
    """Where the rest of a stream should be sent.

    Attributes:
        host, port: of the front's machine.
        secret: of this stream.
    """

    host: str
    port: int
    secret: bytes


class Line:
    """The reading end of a stream.

    Args:
        address: for the replica.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.there: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

    async def parts(self, watched: asyncio.Future[object], first: Part) -> AsyncGenerator[Part]:
        """Parts after the first one.

        Args:
            watched: raises if the replica dies.
            first: has status and headers.

        Raises:
            ConnectionError: the line is cut off, or was not opened.
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
            await asyncio.wait({watched}, timeout=PATIENCE)  # retried sooner, Ray would choose the dead replica again
            raise (watched.done() and watched.exception()) or ConnectionError("a stream was cut off") from None


class Lines:
    """The listener for the streams of a front.

    Args:
        host: address of this machine that the replicas can connect to.
    """

    def __init__(self, host: str) -> None:
        self._host, self._port = host, 0
        self._awaited: dict[bytes, Line] = {}

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Accept streams during the block."""
        server = await asyncio.start_server(self._take, self._host, 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            self._port = 0
            server.close()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Line | None]:
        """A line for one stream during the block; None: the listener is off."""
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
    """The writing end of a stream."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send(self, part: Part) -> None:
        """Send a part; waits if the reader is behind."""
        sent = json.dumps(part.sent, separators=(",", ":")).encode()
        self._writer.write(b"".join((_HEAD.pack(len(sent), len(part.data)), sent, part.data)))
        await self._writer.drain()

    async def end(self) -> None:
        """End the stream."""
        self._writer.write(_HEAD.pack(0, 0))
        await self._writer.drain()


class Dialer:
    """Opens lines to fronts. One that was unreachable is not tried again, or each stream would wait for it."""

    def __init__(self) -> None:
        self._beyond: set[tuple[str, int]] = set()

    @asynccontextmanager
    async def opened(self, address: Address | None) -> AsyncIterator[_Sender | None]:
        """A line to an address; None if it cannot be opened, and parts must go through Ray."""
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
