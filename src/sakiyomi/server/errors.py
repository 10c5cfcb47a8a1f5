"""Errors in the forms that clients read: OpenAI's ``{"error": {"message", "type", "param", "code"}}``, and Anthropic's
``{"type": "error", "error": {"type", "message"}}`` on its own paths.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sakiyomi.core.errors import InputError, MemoryLimitError, SakiyomiError, UnsupportedError
from sakiyomi.server.fields import KINDS

logger = logging.getLogger("sakiyomi.server")


class ErrorBody(BaseModel):
    """The error: a message, its kind, the field to blame, and a code for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """Body of every error reply."""

    error: ErrorBody


class AnthropicError(BaseModel):
    """The error: its kind, and a message."""

    type: str
    message: str


class AnthropicErrorReply(BaseModel):
    """Body of every error reply of Anthropic's interface."""

    type: Literal["error"]
    error: AnthropicError


_ANTHROPIC = "/v1/messages"
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {
    403: "permission_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's interface."""
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


class ApiError(Exception):
    """An error reply.

    Args:
        status: of HTTP.
        message: what was got, what was expected, what to do.
        param: the field to blame.
        code: for programs.
        headers: of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def said(self) -> str:
        """The message, with the field to blame in it."""
        if self.param is None or re.search(rf"(?<!\w){re.escape(self.param)}(?!\w)", self.message):
            return self.message
        return f"{self.param}: {self.message}"

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object, as OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.said, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The same as Anthropic's clients read it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.said}}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error with the name that the client's interface has for the field, or for what it is part of.

        A message that begins with the field's name gets the new one.

        Args:
            names: of fields, by the names that they have here.
        """
        param = self.param or ""
        known = [name for name in names if param == name or param.startswith((name + ".", name + "["))]
        if not known:
            return self
        old = max(known, key=len)
        new = names[old] + param[len(old) :]
        begins = self.message.startswith((param, f"the field {param!r}"))
        message = self.message.replace(param, new, 1) if begins else self.message
        return ApiError(self.status, message, param=new, code=self.code, headers=self.headers)


def bad_request(message: str, param: str | None = None, *, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field to blame."""
    return ApiError(400, message, param=param, code=code)


def unsupported(message: str, param: str | None = None) -> ApiError:
    """A 400 for what this server, or its model, cannot do."""
    return bad_request(message, param, code="unsupported_value")


def busy(message: str, wait: int) -> ApiError:
    """A 429 that says after how many seconds to try again."""
    return ApiError(429, message, code="queue_full", headers={"retry-after": str(wait)})


def no_model(name: str, known: str) -> ApiError:
    """A 404 for a model that the server does not have."""
    message = f"there is no model {name!r:.80}; this server has {known}"
    return ApiError(404, message, param="model", code="model_not_found")


def stopping() -> ApiError:
    """A 503 for requests that come during the shutdown."""
    return ApiError(503, "the server is stopping", code="stopping", headers={"retry-after": "10"})


def api_error(error: BaseException) -> ApiError:
    """The reply to an error: the message of one that a user can cause, no details of an internal one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MemoryLimitError):
        return ApiError(503, error.message, code="out_of_memory", headers={"retry-after": "5"})
    if isinstance(error, InputError | UnsupportedError):
        return bad_request(error.message)
    if isinstance(error, SakiyomiError):
        return ApiError(500, error.message, code="failed")
    return ApiError(500, "internal error; see the log of the server", code="internal_error")


def reply_to(error: BaseException, path: str) -> JSONResponse:
    """The reply to a request to this path that ended by an error."""
    found = api_error(error)
    return JSONResponse(found.anthropic_body if is_anthropic(path) else found.body, found.status, found.headers)


def wrong_body(errors: Sequence[Any], body: Any) -> ApiError:
    """The reply to a body that does not fit its schema: the first error, with the field's name and value.

    Args:
        errors: pydantic's, of which each is real: of unions one kind alone is tried, see ``fields.py``.
        body: as it came.
    """
    first = min(errors, key=_order)
    path, value = _place(first, body)
    kind, found = first["type"], _cut(value)
    if kind == "union_tag_invalid":
        known = re.findall("<([^<>]*)>", first["ctx"]["expected_tags"])
        if isinstance(value, dict) and not set(known) & KINDS:  # objects, told apart by their type
            path += ".type"
            kind, found = "missing" if "type" not in value else kind, _cut(value.get("type"))
            wanted = " or ".join(map(repr, known))
        else:
            wanted = " or ".join(known if set(known) & KINDS else ["object"])
        why = f"Input should be {wanted}"
    else:
        why = first["msg"]
    if kind == "extra_forbidden":
        return bad_request(f"the field {path!r} is not supported here; leave it out", path, code="unsupported_field")
    if kind == "missing":
        return bad_request(f"the field {path!r} is missing", path, code="missing_field")
    return bad_request(f"the field {path!r} is {found}: {why}", path)


def _order(error: Mapping[str, Any]) -> int:
    """Rank of an error: a wrong type comes first, then unknown fields; other errors may follow from these."""
    if error["type"] == "literal_error" and error["loc"][-1] == "type":
        return 0
    return 1 if error["type"] == "extra_forbidden" else 2


def _place(error: Mapping[str, Any], body: Any) -> tuple[str, Any]:
    """Path of an error in the body, as messages[0].content, and the value there; tags of unions are left out."""
    path = ""
    for number, part in enumerate(error["loc"], 1):
        last = number == len(error["loc"])
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
        elif not (last and error["type"] == "missing"):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path, body


def _of_request(error: RequestValidationError) -> ApiError:
    """The reply to a request whose body cannot be read."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        place = next((part for part in first["loc"] if isinstance(part, int)), None)
        where = "" if place is None else f" at character {place}"
        what = first.get("ctx", {}).get("error", first["msg"])
        return bad_request(f"the body is not valid JSON: {what}{where}", code="invalid_json")
    errors = [{**each, "loc": each["loc"][1:]} for each in error.errors()]  # the first part is "body"
    if all(each["loc"] for each in errors):
        return wrong_body(errors, error.body)
    if isinstance(error.body, dict):
        return bad_request("the body has a name in it that is no Unicode text", code="invalid_body")
    found = "empty, or null" if error.body is None else _cut(error.body)
    return bad_request(f"the body is {found}; send a JSON object", code="invalid_body")


def _cut(value: Any) -> str:
    """The value as JSON in ASCII, since JSON strings may hold what is no text; at most one line."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:80] + "..."


ELSEWHERE = {
    "/api/": "that is Ollama's API; this server has OpenAI's, with /v1/chat/completions",
    "/completion": "that is llama.cpp's API; this server has /v1/completions",
}
"""Hints for users of other servers, by the beginning of the path."""


def install(app: FastAPI) -> None:
    """Register handlers that turn every error of an application into such a reply."""

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "")
        if isinstance(error.body, bytes) and "json" not in kind:
            what = f"of the type {kind!r:.80}" if kind else "of no type"
            message = f"the body is {what}; send JSON, and the header content-type: application/json"
            return reply_to(bad_request(message, code="invalid_content_type"), request.scope["path"])
        return reply_to(_of_request(error), request.scope["path"])

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        path, status = request.scope["path"], error.status_code
        hint = next((text for begin, text in ELSEWHERE.items() if path.startswith(begin)), "/docs lists all paths")
        packed = request.headers.get("content-encoding")
        why = (
            f"it is compressed with {packed!r:.40}; send it uncompressed"
            if packed
            else "it is not UTF-8, nested too deeply, or has a number of thousands of digits"
        )
        methods = (error.headers or {}).get("Allow", "other methods")
        known = {
            400: (f"the body cannot be read as JSON: {why}", "invalid_json"),
            404: (f"there is no {path!r:.200}; {hint}", "not_found"),
            405: (f"{path} takes {methods}, not {request.method}", "method_not_allowed"),
        }
        message, code = known.get(status, (str(error.detail), None))
        return reply_to(ApiError(status, message, code=code, headers=error.headers), path)

    @app.exception_handler(ClientDisconnect)
    async def _(request: Request, error: ClientDisconnect) -> Response:
        request.state.log["dropped"] = True
        return Response(status_code=499)  # nobody reads it; the log does

    @app.exception_handler(ApiError)
    @app.exception_handler(SakiyomiError)
    async def _(request: Request, error: Exception) -> JSONResponse:
        return reply_to(error, request.scope["path"])
