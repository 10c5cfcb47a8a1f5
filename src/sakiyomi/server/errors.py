"""Errors in the form that OpenAI's clients read: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from sakiyomi.errors import InputError, MemoryLimitError, SakiyomiError, UnsupportedError

__all__ = ["ApiError", "ErrorReply", "api_error", "body_of", "install", "reply_to"]

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


def api_error(error: BaseException) -> ApiError:
    """What a client is told of an error: the whole of what a user can cause, nothing of what is our own fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MemoryLimitError):
        return ApiError(503, error.message, code="out_of_memory", headers={"retry-after": "5"})
    if isinstance(error, InputError | UnsupportedError):
        return ApiError(400, error.message, code="invalid_value")
    if isinstance(error, SakiyomiError):
        return ApiError(500, error.message, code="failed")
    return ApiError(500, "the server failed; its log says how", code="internal_error")


def reply_to(error: BaseException) -> JSONResponse:
    """The reply to a request that ended by an error."""
    found = api_error(error)
    return JSONResponse(found.body, found.status, found.headers)


def body_of(error: RequestValidationError) -> ApiError:
    """What a client is told of a body that is not as it should be: the first thing, with the field's name."""
    errors = error.errors()
    # An unknown field is said before all else: the other complaints may follow from it.
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    place = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json"
        )
    if not place:
        return ApiError(
            400, f"the body is not what was expected ({first['msg']}); send a JSON object", code="invalid_body"
        )
    name = ".".join(map(str, place))
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"the field {name!r} is not supported here; leave it out", param=name, code="unsupported_field"
        )
    if first["type"] == "missing":
        return ApiError(400, f"the field {name!r} is missing", param=name, code="missing_field")
    return ApiError(400, f"the field {name!r} is wrong: {first['msg']}", param=name, code="invalid_value")


def install(app: FastAPI) -> None:
    """Have every error of an application leave it in this form."""

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        return reply_to(body_of(error))

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        messages = {
            404: f"there is no {request.url.path}; /openapi.json lists what there is",
            405: f"{request.url.path} does not take {request.method}",
        }
        found = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), headers=error.headers)
        return reply_to(found)

    @app.exception_handler(ApiError)
    @app.exception_handler(SakiyomiError)
    async def _(request: Request, error: Exception) -> JSONResponse:
        return reply_to(error)
