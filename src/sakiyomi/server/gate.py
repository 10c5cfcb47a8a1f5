"""What every request passes before a handler sees it: a number, the check of its key and size, and a log line.

Plain ASGI: starlette's BaseHTTPMiddleware would hide from a handler that its client has disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections import Counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError, reply_to
from sakiyomi.server.extract import EXTRACT_BYTES
from sakiyomi.server.logs import failure

logger = logging.getLogger("sakiyomi.server")
BODY_SECONDS = 60.0  # in which a body must arrive
LINGER_SECONDS, LINGER_BYTES = 2.0, 1 << 26  # of a refused body that are still read
REFUSALS, REFUSAL_PAUSE = 10, 0.5  # refusals of a client per second; each further one waits so long
GUARDED = ("/v1/", "/models/", "/metrics", "/tokenize", "/detokenize", "/extract")


class Gate:
    """See the module.

    Args:
        app: what lies behind.
        config: keys and limits.
        max_body: largest body, in bytes.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, max_body: int) -> None:
        self._app, self._config, self._max_body = app, config, max_body
        self._since, self._refusals = 0.0, Counter[str]()
        self._keys = [key.encode() for key in config.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        number = secrets.token_hex(8)
        told = scope.setdefault("state", {})["log"] = {"request_id": number}
        status = 0

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if 400 <= status < 500:
                    await asyncio.sleep(self._pause(scope["state"].get("client", "")))
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
            await send(message)

        try:
            self._check(scope)
            # HEAD is answered as GET; uvicorn leaves the body out.
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(asked, await self._read(scope, receive), numbered)
        except ApiError as error:
            await reply_to(error, scope["path"])(scope, receive, numbered)
        except Exception as error:
            failure(logger, f"request {number} failed", error, prompts=self._config.log_prompts)
            if not status:  # otherwise the reply has begun, and the connection is cut
                await reply_to(error, scope["path"])(scope, receive, numbered)
        finally:
            milliseconds = round(1000 * (time.perf_counter() - began), 1)
            level = logging.DEBUG if scope["path"] in ("/health", "/metrics") else logging.INFO
            line = {"method": scope["method"], "path": scope["path"], "status": status, "ms": milliseconds} | told
            logger.log(level, "%s %s %s", scope["method"], scope["path"], status or "-", extra={"fields": line})

    def _pause(self, client: str) -> float:
        """Seconds that a refusal waits, so that a client that is refused often does not slow down others."""
        now = time.monotonic()
        if now - self._since > 1:
            self._since, self._refusals = now, Counter()
        self._refusals[client] += 1
        return REFUSAL_PAUSE if self._refusals[client] > REFUSALS else 0.0

    def _check(self, scope: Scope) -> None:
        """Check the key, and note the client for fair shares: its key, or else its address."""
        headers = Headers(scope=scope)
        scope["state"]["client"] = (scope.get("client") or ("",))[0]
        if "content-length" in headers and "transfer-encoding" in headers:
            # Two programs may disagree about where such a request ends, and about what the next one is.
            raise ApiError(
                400,
                "the request has both Content-Length and Transfer-Encoding; send one of them",
                code="invalid_header",
                headers={"connection": "close"},
            )
        if not self._keys or not scope["path"].startswith(GUARDED) or scope["method"] == "OPTIONS":
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if "x-api-key" in headers:  # as Anthropic's clients have it
            kind, given = "bearer", headers["x-api-key"]
        # Compare with all of them in constant time, so that the time tells nothing about the keys.
        right = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if not any(right) or kind.lower() != "bearer":
            raise ApiError(
                401,
                "a valid key is missing; send it as the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        scope["state"]["client"] = f"key {right.index(True)}"

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """Read the whole body within its limits; gives a ``receive`` that replays it."""
        most = max(self._max_body, EXTRACT_BYTES) if scope["path"] == "/extract" else self._max_body
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length[:18]) > most:
            if "expect" not in headers:  # whose body has not been sent yet
                await _discard(receive)
            raise self._too_large(length, most)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return receive  # gone already
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        await _discard(receive)
                        raise self._too_large("more", most)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s", code="timeout") from None
        whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replayed() -> Message:
            return whole.pop() if whole else await receive()

        return replayed

    @staticmethod
    def _too_large(size: str, most: int) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes, {most} are taken; send less",
            code="body_too_large",
            headers={"connection": "close"},
        )


async def _discard(receive: Receive) -> None:
    """Read the rest for a moment: closing a connection with unread bytes resets it, and the reply would be lost."""
    left = LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
