"""One endpoint for several replicas. It checks requests as the server does, and runs no model.

It does not use Ray: ``Replicas`` says how a replica is asked, and which errors mean that one has died. Another replica
continues the stream of one that died, with the same text.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from sakiyomi.scale.in_process import Asked, Part
from sakiyomi.scale.routing import affinity_key
from sakiyomi.server.app import IMAGES_BYTES
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError, busy, is_anthropic
from sakiyomi.server.page import rendered
from sakiyomi.server.paths import make_app
from sakiyomi.server.relay import Relay
from sakiyomi.server.stream import event, unless_gone

COLUMNS = ("replica", "machine", "pid", "running", "waiting", "slots", "requests", "tokens", "tau", "cache")
TRIES = 3  # replicas that may die during one request, so that a request that kills replicas does not kill all
SESSION = "x-session-id"
"""Header with the name of a conversation; by default its first messages identify it."""
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class Replicas(Protocol):
    """The replicas behind a front.

    Attributes:
        dead: errors that mean that a replica died during a reply.
        busy: errors that mean that no replica accepts requests.
    """

    dead: tuple[type[BaseException], ...]
    busy: tuple[type[BaseException], ...]

    def ask(self, asked: Asked) -> AsyncGenerator[Part]:
        """Parts of a replica's reply; raises if the replica dies. Closing the generator ends the request."""

    async def figures(self) -> list[dict[str, Any]]:
        """Figures of each replica: its name as ``replica``, its ``metrics``, and others."""


async def follow(replicas: Replicas, asked: Asked) -> AsyncGenerator[Part]:
    """Parts of a reply; another replica continues it if one dies. Closing the generator ends the request.

    Raises:
        ApiError: too many replicas died, or all are busy.
    """
    relay = asked.relay
    assert relay is not None
    for _ in range(TRIES):
        begun = over = False
        try:
            async with aclosing(replicas.ask(asked)) as parts:
                async for part in parts:
                    relay.given += [sent for sent in part.sent if sent.choice >= 0]
                    over = any(sent.choice < 0 for sent in part.sent) or not part.sent
                    begun = True
                    yield part
            return
        except replicas.dead:
            if begun and over:  # all was said
                return
        except replicas.busy:
            raise busy("all replicas are busy; try again soon", 2) from None
    raise ApiError(502, f"{TRIES} replicas died while they answered this request", code="replica_died")


class Front:
    """A ``Backend`` whose requests are answered by replicas.

    Args:
        replicas: answer the requests.
        config: keys and limits of the server.
        lifespan: of the replicas, if they start and stop with the application.
    """

    def __init__(self, replicas: Replicas, config: ServerConfig, lifespan: Lifespan | None = None) -> None:
        self._replicas, self.config = replicas, config
        self.max_body = config.max_body or IMAGES_BYTES
        self.lifespan = lifespan or (lambda app: nullcontext())

    async def reply(self, request: Request, body: Any) -> Response:
        """The reply of a replica; the request ends when the client disconnects.

        The body has been checked, so that invalid requests cost no replica anything; it is passed on unchanged.
        """
        if isinstance(body, BaseModel):
            body = await request.json()
        key = affinity_key(body if isinstance(body, dict) else {}, request.headers.get(SESSION, ""))
        kind = request.headers.get("content-type", "application/json")
        asked = Asked(request.url.path, body, request.state.client, key, Relay(), request.method, kind)
        return await unless_gone(_begun(follow(self._replicas, asked), asked.path), request.receive)

    async def health(self) -> dict[str, Any]:
        """See ``Backend``."""
        count = len(await self._replicas.figures())
        if not count:
            raise ApiError(503, "no replica answers", code="unhealthy")
        return {"status": "ok", "replicas": count}

    async def metrics_page(self) -> bytes:
        """See ``Backend``."""
        return merged_metrics({found["replica"]: found["metrics"] for found in await self._replicas.figures()})


def make_front(replicas: Replicas, config: ServerConfig, lifespan: Lifespan | None = None) -> FastAPI:
    """The application of a ``Front``, with a page that shows the replicas."""
    app = make_app(Front(replicas, config, lifespan))

    @app.get("/replicas", response_class=HTMLResponse)
    async def shown() -> Response:
        """The replicas, for a reader."""
        html = rendered("replicas.html", replicas=await replicas.figures(), columns=COLUMNS)
        return HTMLResponse(html, headers={"content-security-policy": "default-src 'none'"})

    return app


async def _begun(parts: AsyncGenerator[Part], path: str) -> Response:
    """A complete reply, or a stream that has begun."""
    first = await anext(parts)
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in first.headers
        if name not in (b"content-length", b"x-request-id")
    }
    if not headers.get("content-type", "").startswith("text/event-stream"):
        data = first.data + b"".join([part.data async for part in parts])
        return Response(data, first.status, headers)

    async def rest() -> AsyncIterator[bytes]:
        async with aclosing(parts):
            yield first.data
            try:
                async for part in parts:
                    yield part.data
            except ApiError as error:
                yield event(error.anthropic_body, "error") if is_anthropic(path) else event(error.body)

    return StreamingResponse(rest(), first.status, headers)


def merged_metrics(pages: Mapping[str, str]) -> bytes:
    """One page of metrics, whose samples have the replica as a label.

    Args:
        pages: by replica; each sample has a label.
    """
    families: dict[str, list[str]] = {}
    for replica, text in pages.items():
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                lines = families.setdefault(line.split()[2], [])
            if not line.startswith("#"):
                lines.append(re.sub(r"\{", f'{{replica="{replica}",', line, count=1))
            elif line not in lines:
                lines.append(line)
    return "\n".join([line for lines in families.values() for line in lines] + [""]).encode()
