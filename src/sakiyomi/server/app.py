"""`Server`: what the paths (``paths.py``) call. A body becomes jobs for the engine, and their steps become a reply."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from sakiyomi.core.tokens import TokenNames
from sakiyomi.core.transcripts import Task
from sakiyomi.engine.transcription import Transcriber
from sakiyomi.server import errors
from sakiyomi.server.bodies import BodyReader, is_long
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.embeddings import EmbeddingsStyle, asked, embedding_jobs
from sakiyomi.server.errors import ApiError, api_error
from sakiyomi.server.jobs import Call, Event, Job
from sakiyomi.server.kv_events import BLOCK, EventPublisher
from sakiyomi.server.logs import failure
from sakiyomi.server.messages import CountRequest, MessagesRequest, MessagesStyle
from sakiyomi.server.metrics import Metrics
from sakiyomi.server.paths import BODY_THREADS
from sakiyomi.server.relay import Relay, Replay, Sent
from sakiyomi.server.replies import ChatStyle, CompletionStyle, Piece, Sample, Style, usage
from sakiyomi.server.responses import ResponsesRequest, ResponsesStyle
from sakiyomi.server.schema import (
    Ask,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
)
from sakiyomi.server.stream import EventStream, event, unless_gone
from sakiyomi.server.transcriptions import Hearing, read_transcription
from sakiyomi.server.worker import Worker

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

logger = logging.getLogger("sakiyomi.server")
T = TypeVar("T")
GRACE = 5.0  # seconds after request_timeout in which a client may read the rest
BODY_BYTES = 1 << 20  # smallest default of max_body
IMAGES_BYTES = 1 << 25  # the same for a model that reads images
TOKEN_BYTES = 64  # bytes of max_body per token of the context, by default


class Server:
    """The engine of this process as a ``Backend``.

    Args:
        llm: used by this server alone while it runs.
        config: of the server.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.bodies = BodyReader(llm, config)
        self.name = self.bodies.name
        self.names = TokenNames(llm.tokenizer)
        self.metrics = Metrics(self.name, None if llm.profile is None else llm.profile.chosen)
        self.metrics.cache(
            used=lambda: llm.engine.cache_usage,
            size=lambda: llm.target.cache.bytes,
            blocks=llm.target.cache.max_slots * llm.max_context // BLOCK,
        )
        self.events: EventPublisher | None = None
        if config.kv_events is not None:
            llm.engine.reusable()  # raises where nobody can say
            self.events = EventPublisher(config.kv_events, config.kv_events_replay, config.kv_events_topic)
        self.worker = Worker(
            llm.engine, max_queue=config.max_queue, reuse=config.reuse, metrics=self.metrics, events=self.events
        )
        if self.bodies.hears:
            self.transcriber = Transcriber(llm)
        self.began = int(time.time())
        least = IMAGES_BYTES if self.bodies.blind is None or self.bodies.hears else BODY_BYTES
        self.max_body = config.max_body or max(least, TOKEN_BYTES * llm.max_context)
        # Long bodies have a thread of their own, so that short ones do not wait for them.
        self._threads = ThreadPoolExecutor(BODY_THREADS, "bodies")
        self._long = ThreadPoolExecutor(1, "long-bodies")

    async def reply(self, request: Request, body: Any) -> Response:
        """See ``Backend``."""
        match body:
            case CompletionRequest():
                return await self._answer(request, body, self.bodies.completion, CompletionStyle)
            case ChatRequest():
                return await self._answer(request, body, self.bodies.chat, ChatStyle)
            case ResponsesRequest():
                style = functools.partial(ResponsesStyle, asked=body)
                return await self._answer(request, body.chat(), self.bodies.chat, style)
            case MessagesRequest():
                return await self._answer(request, body.chat(self.bodies.template), self.bodies.chat, MessagesStyle)
            case CountRequest():
                (job,) = await self._read(self.bodies.chat, body.chat(self.bodies.template))
                return JSONResponse({"input_tokens": len(job.prompt)})
            case EmbeddingsRequest():
                jobs = functools.partial(embedding_jobs, self.llm, self.bodies, body)
                packed = functools.partial(EmbeddingsStyle, packed=body.encoding_format == "base64")
                return await self._answer(request, asked(body), jobs, packed)
            case TokenizeRequest():
                tokens = await self._read(self.bodies.tokenize, body)
                named = [self.names(token)[0] for token in tokens] if body.return_token_strs else None
                counts = {"count": len(tokens), "max_model_len": self.llm.max_context}
                return JSONResponse(counts | {"tokens": tokens, "token_strs": named})
            case DetokenizeRequest():
                return JSONResponse({"prompt": await self._read(self.bodies.detokenize, body)})
            case bytes():
                return await self._transcribe(request, body)
        name = request.path_params.get("name")
        self.bodies.check_model(name)
        return JSONResponse({"object": "list", "data": [self.card()]} if name is None else self.card())

    async def health(self) -> dict[str, Any]:
        """See ``Backend``."""
        if not self.worker.alive:
            raise ApiError(503, "the server is stopping, or its last round failed; see its log", code="unhealthy")
        return {"status": "ok"}

    async def metrics_page(self) -> bytes:
        """See ``Backend``."""
        return self.metrics.page()

    async def _read(self, made: Callable[[Any], T], body: Any) -> T:
        """Run ``made(body)`` in a thread; the event loop stays free."""
        threads = self._long if isinstance(body, Ask) and is_long(body) else self._threads
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, made, body)
        except ApiError as error:
            raise (body.named(error) if isinstance(body, Ask) else error) from None

    async def _answer(
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
        jobs = await self._read(read, body)
        for job in jobs:
            job.client = request.state.client
        relay: Relay | None = getattr(request.state, "relay", None)
        if relay is not None:
            relay.prepare(jobs)
        relay = relay or Relay(records=False)
        told = request.state.log
        told |= {"prompt_tokens": len(jobs[0].prompt)} | ({"user": body.user} if body.user is not None else {})
        if self.config.log_prompts:
            told["prompt"] = self.llm.tokenizer.decode(jobs[0].prompt)
        call = self.worker.open(jobs)
        objects = style(self.name, self.names, body, relay)
        until = began + self.config.request_timeout

        def close() -> None:
            call.close()
            self._tell(told, jobs)

        if body.stream:
            events = self._events(call, objects, until, told, relay)
            return EventStream(events, close, self.config.request_timeout + GRACE)
        try:
            left = until - asyncio.get_running_loop().time()
            pieces = await unless_gone(self._pieces(call, relay), request.receive, left)
        except TimeoutError:
            raise self._too_late() from None
        finally:
            close()
        if self.config.log_prompts:
            told["reply"] = [piece.text for piece in pieces]
        found = objects.whole(pieces, usage(jobs))
        return PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found)

    async def _transcribe(self, request: Request, body: bytes) -> Response:
        """The text of a sound."""
        if not self.bodies.hears:
            raise errors.unsupported(f"{self.name!r} is no speech model; it writes at /v1/completions")
        loop = asyncio.get_running_loop()
        until = loop.time() + self.config.request_timeout
        task: Task = "translate" if request.url.path.endswith("translations") else "transcribe"
        asked = read_transcription(body, request.headers.get("content-type", ""), task)
        self.bodies.check_model(asked.form.model)
        rate = int(self.transcriber.inputs.extractor.sampling_rate)
        sound = await loop.run_in_executor(self._long, asked.sound, self.config.max_audio_seconds, rate)
        relay: Relay = getattr(request.state, "relay", None) or Relay(records=False)
        params = replace(asked.params, seed=relay.seed if asked.params.seed is None else asked.params.seed)
        begin = functools.partial(self.transcriber.begin, sound, params)
        hearing, told = Hearing(self.worker, begin, request.state.client), request.state.log

        def close() -> None:
            hearing.close()
            told["sound_seconds"] = round(sound.seconds, 2)
            if self.config.log_prompts:
                told["reply"] = "".join(segment.text for segment in hearing.found)
            self._tell(told, hearing.jobs)

        if asked.form.stream:
            events = self._told(hearing.events(asked, relay), until)
            return EventStream(events, close, self.config.request_timeout + GRACE)
        try:
            transcript = await unless_gone(hearing.whole(), request.receive, until - loop.time())
        except TimeoutError:
            raise self._too_late() from None
        finally:
            close()
        found = asked.reply(transcript)
        return PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found)

    async def _told(self, events: AsyncIterator[bytes], until: float) -> AsyncIterator[bytes]:
        """Events of a sound, the last one an error's where there is one; one before the first event is raised."""
        begun = False
        try:
            async with asyncio.timeout_at(until):
                async for data in events:
                    begun = True
                    yield data
        except Exception as error:
            found = self._failure(error)
            if not begun:
                raise found from error
            yield event(found.body)

    async def _steps(self, call: Call, relay: Relay) -> AsyncIterator[tuple[Piece, Sent, bool]]:
        """The tokens that each round added to a choice, and whether the client does not have them yet.

        Raises:
            Exception: what ended a choice instead of its text.
        """
        samples = [Sample(job, self.names, self.llm.tokenizer, relay.names(f"choice {job.index}")) for job in call.jobs]

        def piece(event: Event, fresh: bool) -> tuple[Piece, Sent, bool]:
            sent = Sent(event.job.index, event.step.token_ids, event.over)
            return samples[event.job.index].read(event), sent, fresh

        replay = Replay(call.jobs, relay.given, self.llm.tokenizer)
        for known in replay.events():
            yield piece(known, False)
        async for happened in call:
            if happened.step.error is not None:
                raise happened.step.error
            if (rest := replay.rest(happened)) is not None:
                yield piece(*rest)

    async def _pieces(self, call: Call, relay: Relay) -> list[Piece]:
        pieces = [Piece(job.index) for job in call.jobs]
        async for piece, _, _ in self._steps(call, relay):
            pieces[piece.index].add(piece)
        return pieces

    async def _events(
        self, call: Call, style: Style, until: float, told: dict[str, Any], relay: Relay
    ) -> AsyncIterator[bytes]:
        """The events of a stream. An error before the first event is raised; a later one is sent as an event.

        All events of a step are sent together, so that a front that relays them has all of them or none.
        """
        fresh = {job.index for job in call.jobs}
        try:
            async with asyncio.timeout_at(until):
                async for piece, sent, new in self._steps(call, relay):
                    if self.config.log_prompts:
                        told["reply"] = told.get("reply", "") + piece.text
                    now = usage(call.jobs) if style.figures.continuous_usage_stats else None
                    data = b"".join(style.stream(piece, piece.index in fresh, now))
                    fresh.discard(piece.index)
                    if new:
                        relay.add(sent)
                        yield data
            relay.add(Sent(-1, (), True))
            yield b"".join(style.end(usage(call.jobs)))
        except Exception as error:
            found = self._failure(error)
            if len(fresh) == len(call.jobs):
                raise found from error
            yield style.failure(found)

    def _failure(self, error: Exception) -> ApiError:
        """What ended a stream; one that nobody expected is logged."""
        found = self._too_late() if isinstance(error, TimeoutError) else api_error(error)
        if found.status == 500:
            failure(logger, "a request ended by an error", error, prompts=self.config.log_prompts)
        return found

    def _too_late(self) -> ApiError:
        # The client should not retry by itself: the retry would take as long.
        return ApiError(
            504,
            f"the text was not finished within {self.config.request_timeout:g} s; ask for fewer tokens",
            code="timeout",
            headers={"x-should-retry": "false"},
        )

    def _tell(self, told: dict[str, Any], jobs: list[Job]) -> None:
        """Add the result of the request to its log line."""
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
            "tools": None if self.bodies.form.calls is None else self.bodies.form.calls.models,
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
