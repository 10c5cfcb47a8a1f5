"""The server's application without a socket: a body in, the reply out.

A line of a batch file is answered by the code that answers a request over HTTP: same checks, same errors, same text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from starlette.types import ASGIApp, Message

from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.paths import make_app
from sakiyomi.server.relay import Relay, Sent

if TYPE_CHECKING:
    from sakiyomi.engine.config import LLMConfig
    from sakiyomi.engine.llm import LLM

__all__ = ["InProcessServer", "Part", "load_server"]

ANY_NUMBER = 1 << 30
NEVER = 1e8  # seconds


class Part(NamedTuple):
    """What came of a reply at once.

    Attributes:
        status: of HTTP.
        headers: of HTTP.
        data: bytes of it.
        sent: tokens that its events have.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    data: bytes
    sent: list[Sent]

    @property
    def streams(self) -> bool:
        """Whether the reply consists of events."""
        return any(name == b"content-type" and kind.startswith(b"text/event-stream") for name, kind in self.headers)


class InProcessServer:
    """A model behind the server's application. Use it as an asynchronous context manager.

    Args:
        llm: nobody else may generate with it meanwhile.
        name: of the model, for requests that name one; by default the target's.
        config: of the server; by default one that takes whatever comes.
    """

    def __init__(self, llm: LLM, name: str | None = None, config: ServerConfig | None = None) -> None:
        config = config or ServerConfig(
            served_name=name, max_queue=ANY_NUMBER, max_n=ANY_NUMBER, max_body=ANY_NUMBER, request_timeout=NEVER
        )
        self.server = Server(llm, config)
        self._app: ASGIApp = make_app(self.server)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.server.lifespan(self._app))  # type: ignore[arg-type]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @property
    def alive(self) -> bool:
        """Whether the last round succeeded."""
        return self.server.worker.alive

    def figures(self) -> dict[str, Any]:
        """How it is, and what ``/metrics`` says."""
        metrics, worker = self.server.metrics, self.server.worker
        page = metrics.page().decode()
        return {
            "running": worker.running,
            "waiting": worker.waiting,
            "slots": worker.slots,
            "requests": int(metrics.total("vllm:request_prompt_tokens_count")),
            "tokens": int(metrics.total("vllm:generation_tokens_total")),
            "tau": round(metrics.total("sakiyomi:tau"), 2),
            "cache": f"{self.server.llm.engine.cache_usage:.0%}",
            "metrics": page,
        }

    async def post(self, path: str, body: Any, client: str) -> tuple[int, Any]:
        """Status and object of a reply that is no stream.

        Args:
            path: of the API, such as /v1/completions.
            body: what is asked for; JSON can hold it.
            client: who asks; many of them take turns.
        """
        parts = [part async for part in self.events(path, body, client)]
        return parts[0].status, json.loads(b"".join(part.data for part in parts))

    async def events(
        self,
        path: str,
        body: Any,
        client: str,
        relay: Relay | None = None,
        method: str = "POST",
        kind: str = "application/json",
    ) -> AsyncGenerator[Part]:
        """A reply as it comes. Leaving the loop frees the request's slot in the engine.

        Args:
            path, client: see ``post``.
            body: what is asked for; JSON can hold it, or it is bytes.
            relay: what is known of the request where it may go on elsewhere.
            method: of the request.
            kind: of the body.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent: asyncio.Queue[tuple[Message, list[Sent]] | None] = asyncio.Queue()
        asked: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            events = relay is not None and message["type"] == "http.response.body"
            sent.put_nowait((message, relay.take() if events else []))  # type: ignore[union-attr]

        scope = _scope(path, client, method, kind, {} if relay is None else {"relay": relay})
        task = asyncio.ensure_future(self._app(scope, receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        status, headers = 500, []
        try:
            while (found := await sent.get()) is not None:
                message, tokens = found
                if message["type"] == "http.response.start":
                    status, headers = message["status"], list(message["headers"])
                elif message.get("body") or tokens:
                    yield Part(status, headers, message["body"], tokens)
        finally:
            left.set()
            await asyncio.gather(task, return_exceptions=True)


def load_server(model: LLMConfig, name: str | None = None) -> InProcessServer:
    """The same from what the model is made of, in the process that is to compute.

    Raises:
        SakiyomiError: the model cannot be loaded.
    """
    from sakiyomi.engine.llm import LLM

    return InProcessServer(LLM(**dataclasses.asdict(model)), name)


def _scope(path: str, client: str, method: str, kind: str, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": state,
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", kind.encode("latin-1")), (b"host", b"localhost")],
        "server": ("localhost", 80),
        "client": (client, 1),
    }
