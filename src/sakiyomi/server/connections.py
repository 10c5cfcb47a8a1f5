"""Connections that cost others nothing: how many there may be, and how long a request's header may take to come."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from sakiyomi.server.config import ServerConfig

__all__ = ["protocol"]


def protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    """The protocol class of a server's connections, for ``uvicorn.Config(http=...)``.

    Args:
        config: its ``max_connections``, of which one address may hold half, and its ``header_timeout``.
    """
    held: Counter[str] = Counter()  # connections by address

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _deadline: asyncio.TimerHandle | None = None
        _address: str | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            address = (self.client or ("",))[0]
            if held.total() >= config.max_connections or 2 * held[address] >= max(2, config.max_connections):
                self._refuse(b"503 Service Unavailable")
                return
            self._address = address
            held[address] += 1
            self._wait_for_header()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._address is not None:
                held[self._address] -= 1
                if not held[self._address]:
                    del held[self._address]
                self._address = None
            self._header_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._address is None:
                return  # refused
            super().data_received(data)
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                self._header_came()
            else:  # the beginning of a header, of the first request or of a later one
                self._wait_for_header()

        def _wait_for_header(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(config.header_timeout, self._refuse, b"408 Request Timeout")

        def _header_came(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _refuse(self, status: bytes) -> None:
            if not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                self.transport.close()

    return Connection
