"""Every path of the HTTP API, for a server with its own engine and for a front with servers behind it."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from sakiyomi.core.version import __version__
from sakiyomi.server import errors
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import AnthropicErrorReply, ErrorReply, is_anthropic
from sakiyomi.server.extract import pdf_text
from sakiyomi.server.gate import Gate
from sakiyomi.server.messages import CountRequest, MessagesRequest
from sakiyomi.server.metrics import CONTENT_TYPE
from sakiyomi.server.page import page, reference
from sakiyomi.server.responses import ResponsesRequest
from sakiyomi.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from sakiyomi.server.transcriptions import TranscriptionForm

BODY_THREADS = 2  # bodies, or PDF files, that are read at a time
SAID = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, tuple[type[BaseModel], str, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, "Complete a prompt.", {"prompt": "Once upon a time", "max_tokens": 16}),
    "/v1/chat/completions": (ChatRequest, "Reply to messages.", {"messages": SAID, "max_completion_tokens": 16}),
    "/v1/responses": (ResponsesRequest, "Reply to items.", {"input": "Hello", "max_output_tokens": 16}),
    "/v1/messages": (MessagesRequest, "Reply to messages in Anthropic's form.", {"messages": SAID, "max_tokens": 16}),
    "/v1/messages/count_tokens": (CountRequest, "How many tokens such messages are.", {"messages": SAID}),
    "/v1/embeddings": (
        EmbeddingsRequest,
        "Vectors of texts: the mean of what the model's head reads for their tokens.",
        {"input": ["A fox", "A wolf"]},
    ),
    "/tokenize": (TokenizeRequest, "The tokens of a prompt, or of messages.", {"prompt": "Once upon a time"}),
    "/detokenize": (DetokenizeRequest, "The text of tokens.", {"tokens": [1, 2, 3]}),
}
"""Paths that take JSON: the model of the body, what the path does, and a body that any server answers."""
SOUNDS = {
    "/v1/audio/transcriptions": "The text of a sound.",
    "/v1/audio/translations": "The text of a sound, in English.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
_ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {kind: {"model": AnthropicErrorReply} for kind in _ERRORS}
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"description": "An object, or, with stream, events", "content": {"text/event-stream": {}}}
}
_FILE = {"type": "string", "format": "binary"}
_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": _FILE} | TranscriptionForm.model_json_schema()["properties"],
}
_SOUND = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_PDF = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": _FILE}}}}


class Backend(Protocol):
    """Answers the requests of an application: ``Server``, or ``scale.front.Front``.

    Attributes:
        config: whom the application serves, and its limits.
        max_body: largest body, in bytes.
    """

    config: ServerConfig
    max_body: int

    def lifespan(self, app: FastAPI) -> AbstractAsyncContextManager[None]:
        """Runs while the application does."""

    async def reply(self, request: Request, body: Any) -> Response:
        """The reply to a request.

        Args:
            request: of one of the paths under ``/v1``, or of tokenize or detokenize.
            body: the object that was read from JSON, the bytes of a form, or None for a GET.
        """

    async def health(self) -> dict[str, Any]:
        """The body of ``/health``; raises where requests would fail."""

    async def metrics_page(self) -> bytes:
        """The page of metrics for Prometheus."""


def make_app(backend: Backend) -> FastAPI:
    """The application: all paths, with the checks that every request passes.

    Args:
        backend: answers the requests.
    """
    config = backend.config
    app = FastAPI(
        title="sakiyomi",
        version=__version__,
        lifespan=backend.lifespan,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        redirect_slashes=False,
    )
    errors.install(app)
    app.add_middleware(Gate, config=config, max_body=backend.max_body)
    if origins := list(config.cors_origins):
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    _add_pages(app, backend)
    for path in BODIES:
        _add_body(app, backend, path)
    _add_files(app, backend)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The models of this server."""
        return await backend.reply(request, None)

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        """The model by its name."""
        return await backend.reply(request, None)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether requests are accepted and the last round succeeded."""
        return await backend.health()

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of the server."""
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await backend.metrics_page(), media_type=CONTENT_TYPE)

    return app


def _add_body(app: FastAPI, backend: Backend, path: str) -> None:
    """A path that takes JSON. FastAPI checks the body by the annotation of its parameter."""
    kind, about, example = BODIES[path]

    async def reply(request: Request, body: Any) -> Response:
        return await backend.reply(request, body)

    reply.__annotations__ |= {"request": Request, "body": kind}
    told = (_STREAMS if "stream" in kind.model_fields else {}) | (_ANTHROPIC_ERRORS if is_anthropic(path) else {})
    name = path.removeprefix("/v1/").removeprefix("messages/").strip("/").replace("/", "_")
    more = {"requestBody": {"content": {"application/json": {"example": example}}}}
    app.post(path, name=name, description=about, responses=told, response_model=None, openapi_extra=more)(reply)


def _add_files(app: FastAPI, backend: Backend) -> None:
    """Paths that take a file."""
    for path, about in SOUNDS.items():

        @app.post(path, name=path.rpartition("/")[2], description=about, responses=_STREAMS, openapi_extra=_SOUND)
        async def sound(request: Request) -> Response:
            return await backend.reply(request, await request.body())

    extracting = asyncio.Semaphore(BODY_THREADS)

    @app.post("/extract", openapi_extra=_PDF)
    async def extract(request: Request) -> dict[str, Any]:
        """The text of a PDF."""
        return await pdf_text(await request.body(), extracting)


def _add_pages(app: FastAPI, backend: Backend) -> None:
    """The web page, and the page of all paths."""
    front = page()

    @app.get("/", include_in_schema=False)
    async def start() -> Response:
        return front

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return reference(app.openapi(), str(request.base_url).rstrip("/"), keyed=bool(backend.config.keys))
