"""The server's application without a socket: a body in, the reply out.

A line of a batch file is answered by the code that answers a request over HTTP: same checks, same errors, same text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from starlette.types import ASGIApp, Message

from sakiyomi.server.app import Server, make_app
from sakiyomi.server.config import ServerConfig

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

__all__ = ["InProcessServer"]

ANY_NUMBER = 1 << 30
NEVER = 1e8  # seconds


class InProcessServer:
    """A model behind the server's application. Use it as an asynchronous context manager.

    Args:
        llm: nobody else may generate with it meanwhile.
        name: of the model, for requests that name one; by default the target's.
    """

    def __init__(self, llm: LLM, name: str | None = None) -> None:
        config = ServerConfig(
            served_name=name, max_queue=ANY_NUMBER, max_n=ANY_NUMBER, max_body=ANY_NUMBER, request_timeout=NEVER
        )
        self._server = Server(llm, config)
        self._app: ASGIApp = make_app(self._server)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._server.lifespan(self._app))  # type: ignore[arg-type]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def post(self, path: str, body: Any, client: str) -> tuple[int, Any]:
        """Status and object of a reply that is no stream.

        Args:
            path: of the API, such as /v1/completions.
            body: what is asked for; JSON can hold it.
            client: who asks; many of them take turns.
        """
        parts = [part async for part in self.events(path, body, client)]
        return parts[0][0], json.loads(b"".join(part for _, part in parts))

    async def events(self, path: str, body: Any, client: str) -> AsyncIterator[tuple[int, bytes]]:
        """Status and bytes of a reply as they come. Leaving the loop frees the request's slot in the engine."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        asked: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._app(_scope(path, client), receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        status = 500
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                elif message.get("body"):
                    yield status, message["body"]
        finally:
            left.set()
            await asyncio.gather(task, return_exceptions=True)


def _scope(path: str, client: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "server": ("localhost", 80),
        "client": (client, 1),
    }
