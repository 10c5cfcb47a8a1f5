"""Errors in the form that OpenAI's clients read: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from sakiyomi.core.errors import InputError, MemoryLimitError, SakiyomiError, UnsupportedError

__all__ = ["ApiError", "ErrorReply", "api_error", "bad_request", "body_of", "install", "reply_to"]

logger = logging.getLogger("sakiyomi.server")


class ErrorBody(BaseModel):
    """What went wrong: for a reader, its kind, the field that is to blame, and a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """Body of every reply that is no success."""

    error: ErrorBody


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A reply that is no success.

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
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, *, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field to blame."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: BaseException) -> ApiError:
    """What a client is told of an error: the whole of what a user can cause, nothing of what is our own fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MemoryLimitError):
        return ApiError(503, error.message, code="out_of_memory", headers={"retry-after": "5"})
    if isinstance(error, InputError | UnsupportedError):
        return bad_request(error.message)
    if isinstance(error, SakiyomiError):
        return ApiError(500, error.message, code="failed")
    return ApiError(500, "internal error; see the log of the server", code="internal_error")


def reply_to(error: BaseException) -> JSONResponse:
    """The reply to a request that ended by an error."""
    found = api_error(error)
    return JSONResponse(found.body, found.status, found.headers)


def body_of(error: RequestValidationError) -> ApiError:
    """What a client is told of a body that is not as it should be: the first thing, with the field's name and value."""
    errors = error.errors()
    # An unknown field is said before all else: the other complaints may follow from it.
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    # Unless it belongs to another kind of thing, such as an image: then that is what is not taken.
    tag = (*first["loc"][:-1], "type")
    kind = next((e for e in errors if e["type"] == "literal_error" and e["loc"] == tag), None)
    first = kind or first
    if first["type"] == "json_invalid":
        place = next((part for part in first["loc"] if isinstance(part, int)), None)
        where = "" if place is None else f" at character {place}"
        what = first.get("ctx", {}).get("error", first["msg"])
        return bad_request(f"the body is not valid JSON: {what}{where}", code="invalid_json")
    if len(first["loc"]) < 2 and isinstance(error.body, dict):
        return bad_request("the body has a name in it that is no Unicode text", code="invalid_body")
    if len(first["loc"]) < 2:
        found = "empty, or null" if error.body is None else _cut(error.body)
        return bad_request(f"the body is {found}; send a JSON object", code="invalid_body")
    path, value = _place(first, error.body)
    name = ".".join(map(str, path))
    if first["type"] == "extra_forbidden":
        return bad_request(f"the field {name!r} is not supported here; leave it out", name, code="unsupported_field")
    if first["type"] == "missing":
        return bad_request(f"the field {name!r} is missing", name, code="missing_field")
    # Where a field may be of several kinds, there is a complaint for each of them: the one that is not about the kind
    # tells most, then those that are about a part of it.
    places = [(e, *_place(e, error.body)) for e in errors if e["loc"][: 1 + len(path)] == first["loc"][: 1 + len(path)]]
    about = [found for found in places if not found[0]["type"].endswith(("_type", "literal_error"))] or places
    about = [(kind, path, value)] if kind else about
    path, value = max(((found[1], found[2]) for found in about), key=lambda found: len(found[0]))
    wanted = dict.fromkeys(found[0]["msg"] for found in about if found[1] == path)
    name = ".".join(map(str, path))
    return bad_request(f"the field {name!r} is {_cut(value)}: {'; or: '.join(wanted)}", name)


def _place(error: Mapping[str, Any], body: Any) -> tuple[list[str | int], Any]:
    """Where in the body it is, and what stands there; the kinds that a field may have are part of pydantic's places."""
    path: list[str | int] = []
    for part in error["loc"][1:]:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        path.append(part)
    return path, body


def _cut(value: Any) -> str:
    """As the client wrote it, in ASCII, since not all that JSON can say is text; not more than a line."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:80] + "..."


ELSEWHERE = {
    "/api/": "that is Ollama's API; this server has OpenAI's, with /v1/chat/completions",
    "/completion": "that is llama.cpp's API; this server has /v1/completions",
}
"""What users of other servers look for, by the beginning of the path."""


def install(app: FastAPI) -> None:
    """Have every error of an application leave it in this form."""

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "")
        if isinstance(error.body, bytes) and "json" not in kind:
            what = f"of the type {kind!r:.80}" if kind else "of no type"
            return reply_to(
                bad_request(
                    f"the body is {what}; send JSON, and the header content-type: application/json",
                    code="invalid_content_type",
                )
            )
        return reply_to(body_of(error))

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
        return reply_to(ApiError(status, message, code=code, headers=error.headers))

    @app.exception_handler(ApiError)
    @app.exception_handler(SakiyomiError)
    async def _(request: Request, error: Exception) -> JSONResponse:
        return reply_to(error)
