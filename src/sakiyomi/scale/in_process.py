"""The server's application without a socket.

A line of a batch file is answered by the code that answers HTTP requests: same checks, same errors, same text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from starlette.types import ASGIApp, Message

from sakiyomi.core.memory import loading
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.paths import make_app
from sakiyomi.server.relay import Relay, Sent
from sakiyomi.server.run import warm_up

if TYPE_CHECKING:
    from sakiyomi.engine.config import LLMConfig
    from sakiyomi.engine.llm import LLM

ANY_NUMBER = 1 << 30
NEVER = 1e8  # seconds


class Part(NamedTuple):
    """A part of a reply.

    Attributes:
        status: of HTTP.
        headers: of HTTP.
        data: bytes of the body.
        sent: tokens of the events in it.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    data: bytes
    sent: list[Sent]

    @property
    def streams(self) -> bool:
        """Whether the reply consists of events."""
        return any(name == b"content-type" and kind.startswith(b"text/event-stream") for name, kind in self.headers)


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        path, body, method: of the request; a body that is not JSON is bytes.
        client: for fair shares.
        key: requests with the same key should go to the same replica.
        relay: seed, and the part of the reply that the client has; None: no other server may continue it.
        kind: content type of the body.
    """

    path: str
    body: Any
    client: str = ""
    key: str = ""
    relay: Relay | None = None
    method: str = "POST"
    kind: str = "application/json"


def unlimited(name: str | None = None) -> ServerConfig:
    """Settings of a server without limits.

    Args:
        name: of the model, for requests that name one; by default the target's.
    """
    return ServerConfig(
        served_name=name,
        max_queue=ANY_NUMBER,
        max_n=ANY_NUMBER,
        max_body=ANY_NUMBER,
        request_timeout=NEVER,
        warm_up="none",
    )


class InProcessServer:
    """A model behind the server's application; an asynchronous context manager.

    Args:
        llm: used by this server alone.
        config: of the server.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
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
        """Load, totals and the page of metrics."""
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
            body: JSON values.
            client: for fair shares.
        """
        parts = [part async for part in self.events(Asked(path, body, client))]
        return parts[0].status, json.loads(b"".join(part.data for part in parts))

    async def events(self, request: Asked) -> AsyncGenerator[Part]:
        """Parts of a reply. Closing the generator frees the request's slot in the engine."""
        body, relay = request.body, request.relay
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

        task = asyncio.ensure_future(self._app(_scope(request), receive, send))
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


def load_server(model: LLMConfig, config: ServerConfig) -> InProcessServer:
    """The server of a model, in the process that is to compute.

    Raises:
        SakiyomiError: the model cannot be loaded.
    """
    with loading():
        from sakiyomi.engine.llm import LLM

        llm = LLM(**dataclasses.asdict(model))
    warm_up(llm, config)
    return InProcessServer(llm, config)


def _scope(request: Asked) -> dict[str, Any]:
    return {
        "state": {} if request.relay is None else {"relay": request.relay},
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", request.kind.encode("latin-1")), (b"host", b"localhost")],
        "server": ("localhost", 80),
        "client": (request.client, 1),
    }
