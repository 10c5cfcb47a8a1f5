"""Streams by a socket: what was sent arrives, once; who cannot or must not be heard is not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from sakiyomi.scale import wire
from sakiyomi.scale.in_process import Part
from sakiyomi.scale.wire import Address, Dialer, Line, Lines
from sakiyomi.server.relay import Sent

HOST = "127.0.0.1"
FIRST = Part(200, [(b"content-type", b"text/event-stream; charset=utf-8")], b"data: 0\n\n", [Sent(0, (7,), False)])
PARTS = [
    Part(*FIRST[:2], b"data: \xff\n\n", [Sent(0, (1, 2), False), Sent(1, (), True)]),
    Part(*FIRST[:2], b"", [Sent(0, (3,), True)]),
    Part(*FIRST[:2], b"x" * 300_000, []),
]


class Died(Exception):
    pass


@asynccontextmanager
async def lines() -> AsyncIterator[Lines]:
    found = Lines(HOST)
    async with found.listening():
        yield found


async def read(line: Line, watched: asyncio.Future[object]) -> list[Part]:
    async with asyncio.timeout(10), aclosing(line.parts(watched, FIRST)) as parts:
        return [part async for part in parts]


def run(test: Callable[[Lines, Line, asyncio.Future[object]], Awaitable[Any]]) -> Any:
    """What a coroutine gives that has one line and a replica that lives."""

    async def whole() -> Any:
        async with lines() as found, found.line() as line:
            assert line is not None
            return await test(found, line, asyncio.get_running_loop().create_future())

    return asyncio.run(whole())


async def cut(address: Address, data: bytes = b"") -> None:
    """A replica that dies after so many bytes."""
    _, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(address.secret + data)
    await writer.drain()
    writer.close()


def test_parts_arrive_as_they_were() -> None:
    async def test(_: Lines, line: Line, watched: asyncio.Future[object]) -> list[Part]:
        async with Dialer().opened(line.address) as sender:
            assert sender is not None
            reading = asyncio.ensure_future(read(line, watched))
            for part in PARTS:
                await sender.send(part)
            await sender.end()
            return await reading

    assert run(test) == PARTS
    assert FIRST.streams and not FIRST._replace(headers=[(b"content-type", b"application/json")]).streams


@pytest.mark.parametrize("told", [True, False])
def test_a_cut_line_is_a_death(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a frame; the machine's reason is given where it comes, and waited for."""
    monkeypatch.setattr(wire, "PATIENCE", 0.3)

    async def test(_: Lines, line: Line, watched: asyncio.Future[object]) -> None:
        await cut(line.address, b"\0\0\0\2\0\0\0\5[]ab")
        if told:
            asyncio.get_running_loop().call_later(0.1, watched.set_exception, Died())
        await read(line, watched)

    with pytest.raises(Died if told else ConnectionError):
        run(test)


def test_a_death_ends_a_line_that_hangs() -> None:
    """The machine knows of it, and the socket does not: a node that is gone says nothing."""

    async def test(_: Lines, line: Line, watched: asyncio.Future[object]) -> None:
        async with Dialer().opened(line.address):
            asyncio.get_running_loop().call_later(0.1, watched.set_exception, Died())
            await read(line, watched)

    with pytest.raises(Died):
        run(test)


@pytest.mark.parametrize("dies", [True, False])
def test_a_line_that_never_comes(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PATIENCE", 20 if dies else 0.1)

    async def test(_: Lines, line: Line, watched: asyncio.Future[object]) -> None:
        if dies:
            asyncio.get_running_loop().call_later(0.1, watched.set_exception, Died())
        await read(line, watched)

    with pytest.raises(Died if dies else ConnectionError):
        run(test)


def test_strangers_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong secret, half of one, one that was used: the socket is closed, and the stream is that of its replica."""
    monkeypatch.setattr(wire, "PATIENCE", 0.2)

    async def test(_: Lines, line: Line, watched: asyncio.Future[object]) -> list[Part]:
        async with asyncio.timeout(5):
            for secret in (b"?" * wire.SECRET, b"?"):
                reader, writer = await asyncio.open_connection(HOST, line.address.port)
                writer.write(secret)
                assert await reader.read() == b""
                writer.close()
        async with Dialer().opened(line.address) as sender:
            assert sender is not None
            await sender.send(PARTS[0])
            async with asyncio.timeout(5):
                while not line.there.done():
                    await asyncio.sleep(0.01)
                reader, writer = await asyncio.open_connection(HOST, line.address.port)
                writer.write(line.address.secret)
                assert await reader.read() == b""
                writer.close()
            await sender.end()
            return await read(line, watched)

    assert run(test) == PARTS[:1]


def test_a_reader_that_leaves_ends_the_sender() -> None:
    """And one that is slow holds it up: what is on its way is bounded."""

    async def whole() -> int:
        sent = 0
        async with lines() as found, found.line() as line:
            assert line is not None
            async with Dialer().opened(line.address) as sender:
                assert sender is not None
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1):
                        while True:
                            await sender.send(PARTS[2])
                            sent += 1
                line.there.result()[1].close()
                with pytest.raises(ConnectionError):
                    async with asyncio.timeout(5):
                        while True:
                            await sender.send(PARTS[2])
                            await asyncio.sleep(0)
        return sent

    assert asyncio.run(whole()) < 100


def test_nothing_is_left() -> None:
    """After a line its socket is closed, its secret forgotten; after the block nobody listens."""

    async def whole() -> Address:
        async with lines() as found:
            async with found.line() as line:
                assert line is not None
                reader, writer = await asyncio.open_connection(HOST, line.address.port)
                writer.write(line.address.secret)
                async with asyncio.timeout(5):
                    while not line.there.done():
                        await asyncio.sleep(0.01)
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
            async with found.line() as unused:
                assert unused is not None
            assert not found._awaited
        async with found.line() as none:
            assert none is None
        return line.address

    address = asyncio.run(whole())
    with pytest.raises(OSError):
        socket.create_connection(address[:2], 1)


def test_a_front_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts take Ray's way then."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        address = Address(HOST, free.getsockname()[1], b"!" * wire.SECRET)
        tried: list[int] = []
        dial = asyncio.open_connection

        async def counted(host: str, port: int) -> Any:
            tried.append(port)
            return await dial(host, port)

        monkeypatch.setattr(asyncio, "open_connection", counted)

        async def twice() -> None:
            dialer = Dialer()
            for _ in range(2):
                async with dialer.opened(address) as sender:
                    assert sender is None
            async with dialer.opened(None) as sender:
                assert sender is None

        asyncio.run(twice())
        assert len(tried) == 1
