"""Listens for connections, and shuts down in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from sakiyomi.core.errors import InputError
from sakiyomi.engine.chat_template import read_template
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.opening import Opening, Work

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

logger = logging.getLogger("sakiyomi.server")
BACKLOG = 2048  # connections that wait to be accepted, as in uvicorn
LAST = 2.0  # seconds to send errors to clients whose requests were ended


class _Listener(uvicorn.Server):
    """On a signal it takes no new requests, lets running ones finish for a while, and ends the rest."""

    def __init__(self, config: uvicorn.Config, work: Opening, patience: float) -> None:
        super().__init__(config)
        self._work, self._patience = work, patience

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        count = self._work.load or len(self.server_state.tasks)
        logger.info("stopping; %d requests have %g s to end", count, self._patience)
        self._work.drain()
        cut = asyncio.get_running_loop().call_later(self._patience, self._work.stop)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


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
        InputError: an address is not of this machine.
        LoadError: the chat template cannot be read, or packages for events are missing.
    """
    read_template(config.chat_template)
    if config.kv_events is not None:
        from sakiyomi.server.kv_events import EventPublisher

        EventPublisher(config.kv_events, config.kv_events_replay).close()


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


class Listening:
    """A server that answers from the first second on, and gets its application later.

    It listens while the block runs. Ctrl-C in the block ends it as any other.

    Args:
        config: of the server.

    Attributes:
        config: see ``config``.
        url: its address.

    Raises:
        InputError: the address is in use, or not of this machine.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._listener = _listen(config)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        if config.api_key is None and not config.is_local:
            logger.warning("listening at %s without an api_key: anyone who can connect to it can use the model", host)
        self.config, self._opening = config, Opening(config)
        self._server = _Listener(uvicorn_config(self._opening, config), self._opening, config.shutdown_timeout)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._opening.running.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def tell(self, doing: str) -> None:
        """Say what is being done while the model loads."""
        self._opening.doing = doing

    def run(self, app: ASGIApp, work: Work | None, ready: Callable[[str], None] = lambda url: None) -> None:
        """Pass requests on to an application until SIGTERM or Ctrl-C.

        Args:
            app: answers the requests.
            work: its running requests, to be drained at the end; None: they end by themselves.
            ready: called with the address when requests are answered.
        """
        before = {kind: signal.signal(kind, self._server.handle_exit) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            asyncio.run_coroutine_threadsafe(self._opening.adopt(app, work), self._opening.loop).result()
            ready(self.url)
            self._thread.join()
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
        if self._failure is not None:
            raise self._failure

    def _serve(self) -> None:
        try:
            self._server.run([self._listener])
        except BaseException as error:  # raised where somebody waits for it
            self._failure = error
        finally:
            self._opening.running.set()


def warm_up(llm: LLM, config: ServerConfig) -> None:
    """Record the passes that ``config.warm_up`` names; takes a while."""
    if config.warm_up != "none":
        llm.wait()
        llm.record()
