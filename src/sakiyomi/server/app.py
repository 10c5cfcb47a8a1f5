"""The application: paths, and what each of them does with a body."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.middleware.cors import CORSMiddleware

from sakiyomi.core.tokens import TokenNames
from sakiyomi.core.version import __version__
from sakiyomi.server import errors
from sakiyomi.server.bodies import BodyReader, is_long
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.embeddings import EmbeddingsStyle, asked, embedding_jobs
from sakiyomi.server.errors import AnthropicErrorReply, ApiError, ErrorReply, api_error
from sakiyomi.server.extract import pdf_text
from sakiyomi.server.gate import Gate
from sakiyomi.server.jobs import Call, Event, Job, JobState
from sakiyomi.server.kv_events import BLOCK, EventPublisher
from sakiyomi.server.logs import failure
from sakiyomi.server.messages import CountRequest, MessagesRequest, MessagesStyle
from sakiyomi.server.metrics import CONTENT_TYPE, Metrics
from sakiyomi.server.page import page
from sakiyomi.server.reference import reference
from sakiyomi.server.relay import Relay, Replay, Sent, relayed
from sakiyomi.server.replies import ChatStyle, CompletionStyle, Piece, Sample, Style, usage
from sakiyomi.server.responses import ResponsesRequest, ResponsesStyle
from sakiyomi.server.schema import (
    Ask,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    StreamOptions,
    TokenizeRequest,
)
from sakiyomi.server.stream import EventStream, gone
from sakiyomi.server.transcriptions import (
    TranscriptionForm,
    TranscriptionStyle,
    heard,
    read_transcription,
    sound_jobs,
    spoken,
)
from sakiyomi.server.worker import Worker

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

__all__ = ["Server", "make_app"]

logger = logging.getLogger("sakiyomi.server")
T = TypeVar("T")
GRACE = 5.0  # seconds that a client may take to read what is there when the time is up
BODY_THREADS = 2
BODY_BYTES = 1 << 20  # the least that is taken by default
IMAGES_BYTES = 1 << 25  # the same where the model reads images
TOKEN_BYTES = 64  # of a body by default, for each token of the context
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {kind: {"model": AnthropicErrorReply} for kind in ERRORS}
BYTES = {"type": "string", "format": "binary"}
_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": BYTES} | TranscriptionForm.model_json_schema()["properties"],
}
SOUND = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
PDF = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": BYTES}}}}
REPLIES: dict[int | str, dict[str, Any]] = {
    200: {"description": "An object, or, with stream, events", "content": {"text/event-stream": {}}}
}


class Server:
    """Everything that handlers share.

    Args:
        llm: nobody else may generate with it meanwhile.
        config: of the server.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.bodies = BodyReader(llm, config)
        self.name = self.bodies.name
        self.names = TokenNames(llm.tokenizer)
        self.metrics = Metrics(
            self.name,
            running=lambda: self.worker.count(JobState.RUNNING),
            waiting=lambda: self.worker.count(JobState.WAITING),
            cache_used=lambda: llm.engine.cache_usage,
            cache_bytes=lambda: llm.target.cache.bytes,
            blocks=llm.target.cache.max_slots * llm.max_context // BLOCK,
            chosen=None if llm.profile is None else llm.profile.chosen,
        )
        self.events: EventPublisher | None = None
        if config.kv_events is not None:
            llm.engine.reusable()  # raises where nobody can say
            self.events = EventPublisher(config.kv_events, config.kv_events_replay, config.kv_events_topic)
        self.worker = Worker(
            llm.engine, max_queue=config.max_queue, reuse=config.reuse, metrics=self.metrics, events=self.events
        )
        self.began = int(time.time())
        least = IMAGES_BYTES if self.bodies.blind is None or self.bodies.hears else BODY_BYTES
        self.max_body = config.max_body or max(least, TOKEN_BYTES * llm.max_context)
        # What takes long to read waits for its own kind alone.
        self._threads = ThreadPoolExecutor(BODY_THREADS, "bodies")
        self._long = ThreadPoolExecutor(1, "long-bodies")
        self.extracting = asyncio.Semaphore(BODY_THREADS)

    async def read(self, made: Callable[[Any], T], body: Any) -> T:
        """What a thread makes of a body, while the event loop serves others."""
        threads = self._long if isinstance(body, Ask) and is_long(body) else self._threads
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, made, body)
        except ApiError as error:
            raise (body.named(error) if isinstance(body, Ask) else error) from None

    async def answer(
        self, request: Request, body: Ask, read: Callable[[Any], list[Job]], style: Callable[..., Style]
    ) -> Response:
        """The reply to a body: a stream, or one object.

        Args:
            request: it came with.
            body: of it.
            read: makes jobs of it.
            style: of the objects.
        """
        began = asyncio.get_running_loop().time()
        jobs = await self.read(read, body)
        for job in jobs:
            job.client = request.state.client
        relay: Relay | None = getattr(request.state, "relay", None)
        if relay is not None:
            relay.prepare(jobs)
        told = request.state.log
        told |= {"prompt_tokens": len(jobs[0].prompt)} | ({"user": body.user} if body.user is not None else {})
        if self.config.log_prompts:
            told["prompt"] = self.llm.tokenizer.decode(jobs[0].prompt)
        call = self.worker.open(jobs)
        figures = body.stream_options or StreamOptions()
        objects = style(
            self.name,
            self.names,
            logprobs=jobs[0].params.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            traced=body.trace,
            usage=figures.include_usage or figures.continuous_usage_stats,
            ids=relayed(relay, "reply"),
            created=None if relay is None else relay.created,
        )
        until = began + self.config.request_timeout
        if body.stream:

            def close() -> None:
                call.close()
                self._tell(told, jobs)

            events = self._events(call, objects, figures, until, told, relay)
            return EventStream(events, close, self.config.request_timeout + GRACE)
        try:
            return await self._whole(request, call, objects, until, told)
        finally:
            call.close()
            self._tell(told, jobs)

    async def transcribe(self, request: Request, task: str) -> Response:
        """The text of a sound."""
        if not self.bodies.hears:
            raise errors.bad_request(
                f"{self.name!r} is no speech model; it writes at /v1/completions", code="unsupported_value"
            )
        body, kind = await request.body(), request.headers.get("content-type", "")
        asked = read_transcription(body, kind, task)
        loop = asyncio.get_running_loop()
        parts = await loop.run_in_executor(self._long, heard, self.llm, asked, self.config.max_audio_seconds)
        jobs: list[Job] = []

        def read(body: CompletionRequest) -> list[Job]:
            jobs.extend(sound_jobs(self.bodies, self.llm.max_context, [part for _, part in parts], body))
            return jobs

        style = functools.partial(
            TranscriptionStyle,
            asked=asked,
            seconds=[seconds for seconds, _ in parts],
            spoken=lambda: spoken(jobs, self.llm.tokenizer),
        )
        return await self.answer(request, asked.asked(), read, style)

    async def _whole(self, request: Request, call: Call, style: Style, until: float, told: dict[str, Any]) -> Response:
        writing = asyncio.ensure_future(self._pieces(call))
        leaving = asyncio.ensure_future(gone(request.receive))
        try:
            left = until - asyncio.get_running_loop().time()
            await asyncio.wait({writing, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                pieces = writing.result()
                if self.config.log_prompts:
                    told["reply"] = [piece.text for piece in pieces]
                found = style.whole(pieces, usage(call.jobs))
                return PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found)
            if leaving.done():
                told["dropped"] = True
                return Response(status_code=499)  # nobody reads it; the log does
            raise self._too_late()
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _read(self, call: Call, relay: Relay | None) -> AsyncIterator[tuple[Piece, Sent, bool]]:
        """What each round gave to a choice, and whether it is new to the client.

        Raises:
            Exception: what ended a choice instead of its text.
        """
        samples = [
            Sample(job, self.names, self.llm.tokenizer, relayed(relay, f"choice {job.index}")) for job in call.jobs
        ]

        def piece(event: Event, fresh: bool) -> tuple[Piece, Sent, bool]:
            sent = Sent(event.job.index, event.step.token_ids, event.over)
            return samples[event.job.index].read(event), sent, fresh

        replay = Replay(call.jobs, [] if relay is None else relay.given, self.llm.tokenizer)
        for known in replay.events():
            yield piece(known, False)
        async for happened in call:
            if happened.step.error is not None:
                raise happened.step.error
            if (rest := replay.rest(happened)) is not None:
                yield piece(rest, True)

    async def _pieces(self, call: Call) -> list[Piece]:
        pieces = [Piece(job.index) for job in call.jobs]
        async for piece, _, _ in self._read(call, None):
            pieces[piece.index].add(piece)
        return pieces

    async def _events(
        self,
        call: Call,
        style: Style,
        figures: StreamOptions,
        until: float,
        told: dict[str, Any],
        relay: Relay | None,
    ) -> AsyncIterator[bytes]:
        """What a stream consists of; an error before the first event is raised, a later one is an event.

        What a step brings is sent at once: whoever relays it has all of its events, or none.
        """
        fresh = {job.index for job in call.jobs}
        try:
            async with asyncio.timeout_at(until):
                async for piece, sent, new in self._read(call, relay):
                    if self.config.log_prompts:
                        told["reply"] = told.get("reply", "") + piece.text
                    now = usage(call.jobs) if figures.continuous_usage_stats else None
                    data = b"".join(style.stream(piece, piece.index in fresh, now))
                    fresh.discard(piece.index)
                    if new:
                        if relay is not None:
                            relay.sent.append(sent)
                        yield data
            if relay is not None:
                relay.sent.append(Sent(-1, (), True))
            yield b"".join(style.end(usage(call.jobs), figures.include_usage))
        except Exception as error:
            found = self._too_late() if isinstance(error, TimeoutError) else api_error(error)
            if found.status == 500:
                failure(logger, "a request ended by an error", error, prompts=self.config.log_prompts)
            if len(fresh) == len(call.jobs):
                raise found from error
            yield style.failure(found)

    def _too_late(self) -> ApiError:
        # The client is not to try again by itself: that would take as long.
        return ApiError(
            504,
            f"the text was not finished within {self.config.request_timeout:g} s; ask for fewer tokens",
            code="timeout",
            headers={"x-should-retry": "false"},
        )

    def _tell(self, told: dict[str, Any], jobs: list[Job]) -> None:
        """Into the log's line: what became of it."""
        requests = [job.request for job in jobs if job.request is not None]
        told["completion_tokens"] = sum(request.stats.tokens for request in requests)
        told["finish_reason"] = ",".join(job.reason for job in jobs)
        first = min((job.first for job in jobs if job.first), default=None)
        if first is not None:
            told["first_token_ms"] = round(1000 * (first - jobs[0].arrived), 1)
            told["tau"] = round(sum(r.stats.tau for r in requests) / len(requests), 2)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start and stop of the engine's thread."""
        self.worker.start()
        try:
            yield
        finally:
            self.worker.stop()
            await asyncio.get_running_loop().run_in_executor(None, self.worker.join, 10.0)
            if self.events is not None:
                self.events.close()
            for threads in (self._threads, self._long):
                threads.shutdown(wait=False, cancel_futures=True)

    def card(self) -> dict[str, Any]:
        """The model, as ``/v1/models`` shows it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.began,
            "owned_by": "sakiyomi",
            "max_model_len": self.llm.max_context,
            "drafter": self.bodies.drafter,
            "drafters": list(self.bodies.parts),
            "draft": self._draft_model(),
            "chat_template": self.bodies.has_template,
            "audio": self.bodies.hears,
            "images": self.bodies.blind is None and self.bodies.has_template,
        }

    def _draft_model(self) -> str | None:
        """The draft model's name, without the folders it lies in; None: there is none, or it has no name."""
        draft = self.llm.draft
        for member in () if draft is None else (draft, *draft.members):
            if member.name == "model" and member.model is not None:
                path = Path(getattr(member.model.config, "_name_or_path", ""))
                hub = path.parent.parent.name if path.parent.name == "snapshots" else ""
                return hub.removeprefix("models--").replace("--", "/") or path.name or None
        return None


def make_app(server: Server) -> FastAPI:
    """The application of a server."""
    app = FastAPI(
        title="sakiyomi",
        version=__version__,
        lifespan=server.lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
        redirect_slashes=False,
    )
    errors.install(app)
    app.add_middleware(Gate, config=server.config, max_body=server.max_body)
    if origins := list(server.config.cors_origins):
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    front = page()

    @app.get("/", include_in_schema=False)
    async def start() -> Response:
        """The web page."""
        return front

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """Every path with its fields."""
        return reference(app.openapi(), str(request.base_url).rstrip("/"), keyed=bool(server.config.keys))

    _add_interfaces(app, server)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model of this server."""
        return {"object": "list", "data": [server.card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model by its name."""
        if name != server.name:
            raise ApiError(
                404, f"there is no model {name!r:.80}; this server has {server.name!r}", code="model_not_found"
            )
        return server.card()

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether requests are accepted and the last round succeeded."""
        if not server.worker.alive:
            raise ApiError(503, "the server is stopping, or its last round failed; see its log", code="unhealthy")
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of the server."""
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(server.metrics.page(), media_type=CONTENT_TYPE)

    return app


def _add_interfaces(app: FastAPI, server: Server) -> None:
    """Paths that take a body."""

    @app.post("/v1/completions", responses=REPLIES)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete a prompt."""
        return await server.answer(request, body, server.bodies.completion, CompletionStyle)

    @app.post("/v1/chat/completions", responses=REPLIES)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Reply to messages."""
        return await server.answer(request, body, server.bodies.chat, ChatStyle)

    @app.post("/v1/responses", responses=REPLIES)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Reply to items."""
        style = functools.partial(ResponsesStyle, asked=body)
        return await server.answer(request, body.chat(), server.bodies.chat, style)

    @app.post("/v1/messages", responses=REPLIES | ANTHROPIC_ERRORS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Reply to messages in Anthropic's form."""
        return await server.answer(request, body.chat(server.bodies.template), server.bodies.chat, MessagesStyle)

    @app.post("/v1/messages/count_tokens", responses=ANTHROPIC_ERRORS)
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        """How many tokens such messages are."""
        (job,) = await server.read(server.bodies.chat, body.chat(server.bodies.template))
        return {"input_tokens": len(job.prompt)}

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        """Vectors of texts: the mean of what the model's head reads for their tokens."""
        style = functools.partial(EmbeddingsStyle, packed=body.encoding_format == "base64")
        read = functools.partial(embedding_jobs, server.llm, server.bodies, body)
        return await server.answer(request, asked(body), read, style)

    @app.post("/v1/audio/transcriptions", responses=REPLIES, openapi_extra=SOUND)
    async def transcriptions(request: Request) -> Response:
        """The text of a sound."""
        return await server.transcribe(request, "transcribe")

    @app.post("/v1/audio/translations", responses=REPLIES, openapi_extra=SOUND)
    async def translations(request: Request) -> Response:
        """The text of a sound, in English."""
        return await server.transcribe(request, "translate")

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a prompt, or of messages."""
        tokens = await server.read(server.bodies.tokenize, body)
        named = [server.names(token)[0] for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": server.llm.max_context, "tokens": tokens, "token_strs": named}

    @app.post("/extract", openapi_extra=PDF)
    async def extract(request: Request) -> dict[str, Any]:
        """The text of a PDF."""
        return await pdf_text(await request.body(), server.extracting)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of tokens."""
        return {"prompt": await server.read(server.bodies.detokenize, body)}
