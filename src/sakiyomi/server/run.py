"""Listens for connections, and shuts down in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from sakiyomi.core.errors import InputError
from sakiyomi.engine.chat_template import read_template
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.kv_events import EventPublisher
from sakiyomi.server.paths import make_app

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

logger = logging.getLogger("sakiyomi.server")
BACKLOG = 2048  # connections that wait to be accepted, as in uvicorn
LAST = 2.0  # seconds to send errors to clients whose requests were ended


class _Listener(uvicorn.Server):
    """On a signal it takes no new requests, lets running ones finish for a while, and ends the rest."""

    def __init__(self, config: uvicorn.Config, work: Work | None, patience: float) -> None:
        super().__init__(config)
        self._work, self._patience = work, patience

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        count = len(self.server_state.tasks) if self._work is None else self._work.load
        logger.info("stopping; %d requests have %g s to end", count, self._patience)
        if self._work is None:
            await super().shutdown(sockets)
            return
        self._work.drain()
        cut = asyncio.get_running_loop().call_later(self._patience, self._work.stop)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


class Work(Protocol):
    """The running requests of an application; see ``Worker``."""

    @property
    def load(self) -> int:
        """See there."""

    def drain(self) -> None:
        """See there."""

    def stop(self) -> None:
        """See there."""


def _protocol(config: ServerConfig) -> type[asyncio.Protocol]:
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


def uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """Uvicorn's settings for an application."""
    return uvicorn.Config(
        app,
        http=_protocol(config),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(config.shutdown_timeout + LAST) + 1,
        lifespan="on",
        ws="none",  # none are used, and uvicorn would warn about a missing package
    )


def check(config: ServerConfig) -> None:
    """Check the settings before the model is loaded, which takes a while.

    Raises:
        InputError: an address is in use, or not of this machine.
        LoadError: the chat template cannot be read, or packages for events are missing.
    """
    read_template(config.chat_template)
    if config.kv_events is not None:
        EventPublisher(config.kv_events, config.kv_events_replay).close()
    _listen(config).close()


def _listen(config: ServerConfig) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)  # two sockets may be bound to one address, but only one can listen
    except OSError as error:
        listener.close()
        advice = "; choose another --port, 0 for a free one" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise InputError(f"cannot listen at {config.host}:{config.port}: {error.strerror or error}{advice}") from None
    return listener


def warm_up(llm: LLM, config: ServerConfig) -> None:
    """Record the passes that ``config.warm_up`` names; takes a while."""
    if config.warm_up != "none":
        llm.wait()
        llm.record()


def serve(llm: LLM, config: ServerConfig, *, listening: Callable[[str], None] = lambda url: None) -> None:
    """Serve a model; see ``listen``.

    Args:
        llm: used by this server alone.
        config: of the server.
        listening: called with the address when clients can connect.

    Raises:
        InputError: the address is in use, or not of this machine.
    """
    server = Server(llm, config)
    serve_app(make_app(server), server.worker, config, listening=listening)


def serve_app(
    app: ASGIApp, work: Work | None, config: ServerConfig, *, listening: Callable[[str], None] = lambda url: None
) -> None:
    """Serve an application.

    Args:
        app: answers the requests.
        work: its running requests, to be drained at the end; None: they end by themselves.
        config, listening: see ``serve``.

    Raises:
        InputError: see there.
    """
    listener = _listen(config)
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    if config.api_key is None and not config.is_local:
        logger.warning("listening at %s without an api_key: anyone who can connect to it can use the model", host)
    # uvicorn raises the signal again after its shutdown; ignore it then.
    before = {kind: signal.signal(kind, lambda *_: None) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        listening(f"http://{host}:{port}")
        _Listener(uvicorn_config(app, config), work, config.shutdown_timeout).run([listener])
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        listener.close()
