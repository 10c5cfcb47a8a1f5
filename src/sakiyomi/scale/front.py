"""One endpoint for several replicas: it reads requests as the server does, and computes nothing.

It does not use Ray: ``Replicas`` says how a replica is asked, and which errors mean that one has died. Another replica
continues the stream of one that died, with the same text.
"""

from __future__ import annotations

import html
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
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
from sakiyomi.server.errors import ApiError, is_anthropic
from sakiyomi.server.paths import make_app
from sakiyomi.server.relay import Relay
from sakiyomi.server.stream import event, unless_gone

__all__ = ["Replicas", "follow", "make_front", "merged_metrics"]

TRIES = 3  # replicas that may die of a request: one that kills its replicas must not kill all
SESSION = "x-session-id"
"""Header that names a conversation; without it the first messages do."""
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class Replicas(Protocol):
    """What stands behind a front.

    Attributes:
        dead: errors that mean that a replica died while it answered.
        busy: those that mean that no replica takes more.
    """

    dead: tuple[type[BaseException], ...]
    busy: tuple[type[BaseException], ...]

    def ask(self, asked: Asked) -> AsyncGenerator[Part]:
        """A replica's reply as it comes; raises where the replica dies. Closed, nothing is computed any longer."""

    async def figures(self) -> list[dict[str, Any]]:
        """What each replica says of itself: ``replica``, its ``metrics``, and figures."""


async def follow(replicas: Replicas, asked: Asked) -> AsyncGenerator[Part]:
    """A reply, from as many replicas as it takes. Leaving the loop frees the request's slot.

    Raises:
        ApiError: replicas died, again and again.
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
            raise ApiError(
                429, "all replicas are busy; try again soon", code="queue_full", headers={"retry-after": "2"}
            ) from None
    raise ApiError(502, f"{TRIES} replicas died while they answered this request", code="replica_died")


class Front:
    """Answers by replicas, see ``Backend``.

    Args:
        replicas: that answer.
        config: of the server: whom it serves, and limits.
        lifespan: of what stands behind it, if it begins and ends with the application.
    """

    def __init__(self, replicas: Replicas, config: ServerConfig, lifespan: Lifespan | None = None) -> None:
        self._replicas, self.config = replicas, config
        self.max_body = config.max_body or IMAGES_BYTES
        self.lifespan = lifespan or (lambda app: nullcontext())

    async def reply(self, request: Request, body: Any) -> Response:
        """What a replica says; nothing is asked for any longer when the client has gone.

        The body was read, so that what is no request costs no replica anything; a replica gets it as it came.
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
        return HTMLResponse(_table(await replicas.figures()), headers={"content-security-policy": "default-src 'none'"})

    return app


async def _begun(parts: AsyncGenerator[Part], path: str) -> Response:
    """A reply that is whole, or a stream that has begun, of a request to this path."""
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
    """Pages of metrics as one, in which every sample says whose it is.

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


COLUMNS = ("replica", "machine", "pid", "running", "waiting", "slots", "requests", "tokens", "tau", "cache")


def _table(found: Sequence[Mapping[str, Any]]) -> str:
    """A page that shows the replicas, and loads itself again."""
    head = "".join(f"<th>{name}" for name in COLUMNS)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(str(one[name]))}" for name in COLUMNS) for one in found)
    return (
        '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>sakiyomi: replicas</title>'
        f"<h1>{len(found)} replicas</h1><table border cellpadding=4><tr>{head}{rows}</table>"
    )
