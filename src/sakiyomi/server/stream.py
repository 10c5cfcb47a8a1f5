"""Server-sent events, and work that ends when its client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """One event, which may have a name."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_encode(value)}\n\n".encode()


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive, patience: float | None = None) -> T:
    """Work for a client that waits for it; the work is cancelled when the client drops its connection.

    Args:
        work: what to do.
        receive: of the request, whose body must have been read.
        patience: seconds that it may take; None: no limit.

    Returns:
        The result of the work.

    Raises:
        ClientDisconnect: the client has gone.
        TimeoutError: the time is over.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        done, _ = await asyncio.wait({working, leaving}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if working in done:
        return working.result()
    raise ClientDisconnect if leaving in done else TimeoutError


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A reply of events. It ends with them, when the client disconnects, or when the client has not read for too long.

    The reply begins with the first event: an error before it gets an HTTP status of its own.

    Args:
        events: what to send.
        close: called at the end, also after an error.
        patience: seconds for the whole reply, for a client that does not read.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], patience: float) -> None:
        # x-accel-buffering: nginx would collect events until it has some kilobytes.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._patience = events, close, patience
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await unless_gone(self._send(send), receive, self._patience)
        except (ClientDisconnect, OSError):  # or the client does not read
            if not self._begun:
                raise ClientDisconnect from None
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        async for data in self._events:
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
