"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``: text of sounds, for a target that is a speech model.

The windows of a sound are read one after the other. Each is a request of the engine, which shares passes with others.
"""

from __future__ import annotations

import asyncio
import functools
import io
from collections.abc import AsyncIterator, Callable
from email.message import Message
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import DivergedError, InputError, LoadError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.subtitles import WRITERS, verbose, words
from sakiyomi.core.transcripts import FALLBACK, Segment, Task, Timestamps, Transcript, TranscriptionParams
from sakiyomi.server.errors import bad_request
from sakiyomi.server.jobs import Call, Job
from sakiyomi.server.relay import Relay, Sent
from sakiyomi.server.schema import read_as
from sakiyomi.server.stream import event

if TYPE_CHECKING:
    from sakiyomi.engine.transcription import SoundInWork
    from sakiyomi.server.worker import Worker

MOST_PARTS = 64  # of a form
FORM = "send a form: curl -F file=@speech.wav -F model=whisper URL"


class TranscriptionForm(BaseModel):
    """Fields of the form; all are sent as text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool = False
    chunking_strategy: Literal["auto"] | None = None
    timestamp_granularities: list[Literal["segment", "word"]] = []

    def params(self, task: Task) -> TranscriptionParams:
        """How the sound is transcribed. Timestamps are written where the reply shows them; 0 is greedy at first."""
        shown: Timestamps = "none" if self.response_format in ("json", "text") else "segment"
        return TranscriptionParams(
            language=self.language,
            task=task,
            timestamps="word" if "word" in self.timestamp_granularities else shown,
            temperatures=(self.temperature,) if self.temperature else FALLBACK,
            prompt=self.prompt,
            seed=self.seed,
        )


class Transcription:
    """A request with a form.

    Args:
        form: its fields.
        file: the sound's bytes.
        params: of the transcription.
    """

    def __init__(self, form: TranscriptionForm, file: bytes, params: TranscriptionParams) -> None:
        self.form, self.file, self.params = form, file, params

    def sound(self, longest: float, rate: int) -> Audio:
        """The sound at a sampling rate; takes a while.

        Args:
            longest: most seconds.
            rate: samples a second.

        Raises:
            ApiError: the file is no sound, or too long.
        """
        try:
            return Audio.read(io.BytesIO(self.file), sampling_rate=rate, longest=longest)
        except (InputError, LoadError) as error:
            raise bad_request(error.message, "file") from None

    def reply(self, transcript: Transcript) -> dict[str, Any] | str:
        """The body of the reply: an object, or a text."""
        form = self.form
        if form.response_format == "text":
            return transcript.text + "\n"
        if form.response_format in ("srt", "vtt"):
            return WRITERS[form.response_format](transcript)
        used = {"type": "duration", "seconds": round(transcript.seconds, 2)}
        if form.response_format == "json":
            return {"text": transcript.text, "usage": used}
        found = verbose(transcript) | {"usage": used}
        shown = form.timestamp_granularities or ["segment"]
        for segment in found["segments"]:
            segment.pop("words", None)
        if "segment" not in shown:
            del found["segments"]
        return found | ({"words": words(transcript)} if "word" in shown else {})


def read_form(body: bytes, content_type: str) -> dict[str, list[bytes]]:
    """Values of each field of a multipart form, in their order.

    Raises:
        ApiError: the body is no valid form.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary.isascii():
        raise bad_request(f"the body is {content_type[:60]!r}; expected multipart/form-data with a boundary; {FORM}")
    first, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode())
    if first or not parts or not parts[-1].startswith(b"--"):
        raise bad_request(f"the form does not begin or end with its boundary; {FORM}")
    if len(parts) > MOST_PARTS:
        raise bad_request(f"the form has {len(parts)} parts; {MOST_PARTS} are taken")
    found: dict[str, list[bytes]] = {}
    for part in parts[:-1]:
        head, divider, value = part.partition(b"\r\n\r\n")
        about = Message()
        for line in head.decode("utf-8", "replace").split("\r\n"):
            key, _, text = line.partition(":")
            if key.strip().lower() == "content-disposition":
                about["content-disposition"] = text.strip()
        name = about.get_param("name", header="content-disposition")
        if not divider or not isinstance(name, str):
            raise bad_request(f"a part of the form has no name; {FORM}")
        found.setdefault(name, []).append(value)
    return found


def read_transcription(body: bytes, content_type: str, task: Task) -> Transcription:
    """The form of a request.

    Raises:
        ApiError: the form or its file is missing, or a field is invalid.
    """
    fields = read_form(body, content_type)
    files = fields.pop("file", [])
    if len(files) != 1:
        raise bad_request(f"the form has {len(files)} fields named file; send one sound", "file", code="missing_field")
    if task == "translate" and "language" in fields:
        raise bad_request("a translation is into English, whatever is spoken; leave language out", "language")
    values: dict[str, Any] = {}
    for name, given in fields.items():
        texts = [value.decode("utf-8", "replace") for value in given]
        values[name.removesuffix("[]")] = texts if name.endswith("[]") else texts[-1]
    form = read_as(TranscriptionForm, values)
    if form.stream and form.response_format not in ("json", "verbose_json"):
        raise bad_request("a stream consists of events; leave response_format out", "response_format")
    if "word" in form.timestamp_granularities and form.response_format != "verbose_json":
        raise bad_request(
            f"response_format is {form.response_format}, which has no words; ask for verbose_json",
            "timestamp_granularities",
        )
    return Transcription(form, files[0], form.params(task))


class Hearing:
    """A sound whose windows the engine reads, between those of other requests.

    Args:
        worker: runs the engine.
        begin: makes the sound's features; called in a thread of its own.
        client: for fair scheduling.

    Attributes:
        found: its segments so far.
    """

    def __init__(self, worker: Worker, begin: Callable[[], SoundInWork], client: str) -> None:
        self._worker, self._begin, self._client = worker, begin, client
        self._begun: SoundInWork | None = None
        self._call: Call | None = None
        self.found: list[Segment] = []

    @property
    def jobs(self) -> list[Job]:
        """Of its windows so far, several for one that is tried again."""
        return [] if self._call is None else self._call.jobs

    async def segments(self) -> AsyncIterator[Segment]:
        """Each segment when it is known.

        Raises:
            Exception: what ended a window instead of its text.
        """
        begun = self._begun = await asyncio.get_running_loop().run_in_executor(None, self._begin)
        while not begun.over:
            job = Job([], SamplingParams(), index=len(self.jobs), client=self._client, submit=begun.submit)
            if self._call is None:
                self._call = self._worker.open([job])
            else:
                self._worker.follow(self._call, job)
            async for happened in self._call:
                if happened.step.error is not None:
                    raise happened.step.error
            assert job.request is not None
            for segment in await self._worker.run(functools.partial(begun.take, job.request.generation())):
                self.found.append(segment)
                yield segment

    def _transcript(self) -> Transcript:
        assert self._begun is not None
        return self._begun.transcript(self.found)

    async def whole(self) -> Transcript:
        """The transcript."""
        async for _ in self.segments():
            pass
        return self._transcript()

    async def events(self, asked: Transcription, relay: Relay) -> AsyncIterator[bytes]:
        """Events of a stream: each segment's text, with verbose_json its times too, and at the end the reply.

        Args:
            asked: the request.
            relay: has the segments that another server has sent; they are not sent again.

        Raises:
            DivergedError: what it has sent differs.
        """
        async for segment in self.segments():
            number = len(self.found) - 1
            if number < len(relay.given):
                if relay.given[number].tokens != segment.tokens:
                    raise DivergedError(f"segment {number} is {segment.text!r:.80}, and another one was sent")
                continue
            relay.add(Sent(0, segment.tokens, False))
            data = event({"type": "transcript.text.delta", "delta": segment.text})
            if asked.form.response_format == "verbose_json":
                times = {"start": round(segment.start, 3), "end": round(segment.end, 3), "text": segment.text}
                data += event({"type": "transcript.text.segment", "id": str(number), **times})
            yield data
        done = asked.reply(self._transcript())
        assert isinstance(done, dict)
        relay.add(Sent(-1, (), True))
        yield event({"type": "transcript.text.done", **done})

    def close(self) -> None:
        """End what is under way."""
        if self._call is not None:
            self._call.close()
