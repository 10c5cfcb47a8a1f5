"""The port is open while a model loads: what is being done is told at once, and requests wait or are refused.

Imports neither torch nor FastAPI, which take most of the time until a model is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sakiyomi.server.config import ServerConfig

RETRY_AFTER = 1  # seconds


class Work(Protocol):
    """The running requests of an application; see ``Worker``."""

    @property
    def load(self) -> int:
        """See there."""

    def drain(self) -> None:
        """See there."""

    def stop(self) -> None:
        """See there."""


class Opening:
    """An application that passes requests on to another one, as soon as that is there. Its lifespan is the other's too.

    Args:
        config: what requests do meanwhile.

    Attributes:
        doing: what is being done; set by the thread that loads the model.
        running: the event loop runs.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._began = time.monotonic()
        self._app: ASGIApp | None = None
        self._work: Work | None = None
        self._life: _Life | None = None
        self.doing = "starting"
        self.running = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if self._app is None and scope["method"] not in ("GET", "HEAD") and self._config.while_loading == "wait":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), self._config.request_timeout)
        if self._app is None:
            await self._told(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def adopt(self, app: ASGIApp, work: Work | None) -> None:
        """Start an application, and pass all requests on to it from now on.

        Args:
            app: not started yet.
            work: its running requests, to be drained at the end; None: they end by themselves.

        Raises:
            Exception: what its lifespan raises.
        """
        life = _Life(app)
        await life.start()
        self._app, self._work, self._life = app, work, life
        self._settled.set()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.loop, self._settled = asyncio.get_running_loop(), asyncio.Event()
        self.running.set()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._life is not None:
            await self._life.end()
        await send({"type": "lifespan.shutdown.complete"})

    def _told(self, scope: Scope) -> Response:
        """What is being done: a page for people, an error in the form of the path for programs."""
        headers = {"retry-after": str(RETRY_AFTER), "cache-control": "no-store"}
        if scope["path"] == "/":
            from sakiyomi.server.page import as_page, web_file

            return as_page(web_file("loading.html"), status=503, **headers)
        seconds = round(time.monotonic() - self._began, 1)
        message = f"the model is loading ({self.doing}, {seconds:.0f} s so far); try again in {RETRY_AFTER} s"
        error: dict[str, Any] = {"message": message, "type": "server_error", "param": None, "code": "loading"}
        body: dict[str, Any] = {"error": error}
        if scope["path"].startswith("/v1/messages"):
            body = {"type": "error", "error": {"type": "overloaded_error", "message": message}}
        body |= {"status": "loading", "doing": self.doing, "seconds": seconds}
        return Response(json.dumps(body), status_code=503, media_type="application/json", headers=headers)

    # ------------------------------------------------------------ running requests

    @property
    def load(self) -> int:
        """See ``Work``."""
        return 0 if self._work is None else self._work.load

    def drain(self) -> None:
        """See ``Work``. Requests that still wait for the model are refused."""
        self._settled.set()
        if self._work is not None:
            self._work.drain()

    def stop(self) -> None:
        """See ``Work``."""
        if self._work is not None:
            self._work.stop()


class _Life:
    """The lifespan of an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._told: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._run = asyncio.ensure_future(app(scope, self._told.get, self._answers.put))

    async def start(self) -> None:
        """Returns when it is ready.

        Raises:
            Exception: what it raises.
        """
        await self._told.put({"type": "lifespan.startup"})
        if (await self._answers.get())["type"] == "lifespan.startup.failed":
            await self._run
            raise RuntimeError("the application did not start; see its log")

    async def end(self) -> None:
        """Returns when it has ended."""
        await self._told.put({"type": "lifespan.shutdown"})
        await self._run
