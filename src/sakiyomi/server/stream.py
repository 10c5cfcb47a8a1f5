"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "EventStream", "event", "gone"]

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """One event, which may have a name."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_encode(value)}\n\n".encode()


async def gone(receive: Receive) -> None:
    """Return when the client has dropped its connection; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A reply of events, as they come. Ends when they do, when the client goes, or when it has not read for too long.

    It begins with the first event: an error before that is one of the whole request, with a status of its own.

    Args:
        events: what to send; they end by themselves.
        close: called at the end, whatever the end is.
        patience: seconds that the whole may take. Events end before; it is for a client that does not read them.
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
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sending, leaving}, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            leaving.cancel()
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if sending.cancelled():
            if not self._begun:
                await Response(status_code=499)(scope, receive, send)  # nobody reads it; the log does
        elif (error := sending.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _send(self, send: Send) -> None:
        async for data in self._events:
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
