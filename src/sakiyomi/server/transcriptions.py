"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``: text of sounds, for a target that is a speech model.

A long sound is split at silences; its parts are separate requests, which share passes.
"""

from __future__ import annotations

import io
import re
import wave
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.engine.encoder_inputs import Heard, hear
from sakiyomi.server.bodies import BodyReader
from sakiyomi.server.errors import bad_request
from sakiyomi.server.jobs import Job
from sakiyomi.server.replies import Piece, Style
from sakiyomi.server.schema import CompletionRequest, read_as
from sakiyomi.server.stream import event

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
MOST_PARTS = 64  # of a form
FORM = "send a form: curl -F file=@speech.wav -F model=whisper URL"
RATE = 48000 * 2  # samples per second of all channels, above which a sound counts as longer


class TranscriptionForm(BaseModel):
    """Fields of the form; all are sent as text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    language: str | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool = False
    chunking_strategy: Literal["auto"] | None = None
    timestamp_granularities: list[Literal["segment"]] = []


class Transcription:
    """A request with a form.

    Args:
        form: its fields.
        file: the sound's bytes.
        task: "transcribe" or "translate".
    """

    def __init__(self, form: TranscriptionForm, file: bytes, task: str) -> None:
        self.form, self.file, self.task = form, file, task

    def asked(self) -> CompletionRequest:
        """The completion request for each part of the sound."""
        form = self.form
        values = {"model": form.model, "prompt": "", "temperature": form.temperature, "seed": form.seed}
        return CompletionRequest.model_validate(values | {"stream": form.stream, "max_tokens": None})


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


def read_transcription(body: bytes, content_type: str, task: str) -> Transcription:
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
    if form.stream and form.response_format != "json":
        raise bad_request("a stream consists of events; leave response_format out", "response_format")
    return Transcription(form, files[0], task)


def heard(llm: LLM, asked: Transcription, most: float) -> list[tuple[float, Heard]]:
    """Parts of a sound as inputs of the encoder, each with its seconds; takes a while.

    Raises:
        ApiError: the file is no sound, or too long.
    """
    try:
        if (seconds := _seconds(asked.file)) > most:
            raise bad_request(
                f"the sound is about {seconds:.0f} s long; this server takes {most:g} s (max_audio_seconds)", "file"
            )
        task = None if asked.task == "transcribe" else asked.task
        sound = Audio.read(io.BytesIO(asked.file), language=asked.form.language, task=task)
        encoder = llm.target.weights.encoder
        assert encoder is not None and encoder.limit is not None
        frames = 2 * encoder.limit  # its second convolution halves them
        window = float(frames * llm.processor.hop_length / llm.processor.sampling_rate)
        parts = sound.split(window, at_silences=True)
        return [(part.seconds, hear(part, llm.processor, frames)) for part in parts]
    except (InputError, LoadError) as error:
        raise bad_request(error.message, "file") from None


def _seconds(file: bytes) -> float:
    """Length of a sound by its header, at a usual sample rate; 0 if it has none."""
    try:
        with wave.open(io.BytesIO(file)) as sound:
            rate, channels, count = sound.getframerate(), sound.getnchannels(), sound.getnframes()
            return float(count / rate * max(1.0, rate * channels / RATE))
    except (wave.Error, EOFError, ZeroDivisionError):
        pass
    try:
        import soundfile

        about = soundfile.info(io.BytesIO(file))
        return float(about.duration * max(1.0, about.samplerate * about.channels / RATE))
    except (ImportError, RuntimeError):
        return 0.0


def sound_jobs(bodies: BodyReader, limit: int, parts: Sequence[Heard], body: CompletionRequest) -> list[Job]:
    """Jobs for the parts of a sound, of at most ``limit`` tokens each.

    Raises:
        ApiError: the request names another model.
    """
    bodies.check_model(body.model)
    return [
        Job([], bodies.params(body, [], limit, None), (i,), bodies.drafter is not None, index=i, heard=part)
        for i, part in enumerate(parts)
    ]


def spoken(jobs: Sequence[Job], tokenizer: Any) -> str | None:
    """The language code in the first part's prompt; None: the model has one language."""
    names = tokenizer.convert_ids_to_tokens(jobs[0].prompt)
    return next((found[1] for name in names if (found := _LANGUAGE.fullmatch(name)) is not None), None)


class TranscriptionStyle(Style):
    """Of both paths. A stream has the parts in order: text of a later part waits for the earlier ones.

    Args:
        asked: the form.
        seconds: of each part.
        spoken: gives the language, once it is known.
    """

    def __init__(
        self,
        *args: Any,
        asked: Transcription,
        seconds: Sequence[float],
        spoken: Callable[[], str | None],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._asked, self._seconds, self._spoken = asked, seconds, spoken
        self._texts = [""] * len(seconds)
        self._over = [False] * len(seconds)
        self._sent = 0  # parts whose text was sent in full
        self._told = [0] * len(seconds)

    def whole(self, pieces: Sequence[Piece], figures: dict[str, Any]) -> dict[str, Any] | str:
        """The reply."""
        text = "".join(piece.text for piece in pieces).strip()
        if self._asked.form.response_format == "text":
            return text + "\n"
        if self._asked.form.response_format != "verbose_json":
            return {"text": text, "usage": self._used()}
        segments, begin = [], 0.0
        for piece, seconds in zip(pieces, self._seconds, strict=True):
            segments.append(
                {
                    "id": piece.index,
                    "seek": round(100 * begin),
                    "start": round(begin, 2),
                    "end": round(begin + seconds, 2),
                    "text": piece.text,
                    "tokens": [token.token_id for token in piece.tokens],
                    "temperature": self._asked.form.temperature,
                }
            )
            begin += seconds
        return {
            "task": self._asked.task,
            "language": self._asked.form.language or self._spoken(),
            "duration": round(begin, 2),
            "text": text,
            "segments": segments,
            "usage": self._used(),
        }

    def _used(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": round(sum(self._seconds), 2)}

    def stream(self, piece: Piece, first: bool, figures: dict[str, Any] | None) -> Iterator[bytes]:
        """What of the text is new, in the order of the parts."""
        self._texts[piece.index] += piece.text
        self._over[piece.index] = piece.finish_reason is not None
        while self._sent < len(self._texts):
            text = self._texts[self._sent]
            if fresh := text[self._told[self._sent] :]:
                self._told[self._sent] = len(text)
                yield event({"type": "transcript.text.delta", "delta": fresh})
            if not self._over[self._sent]:
                return
            self._sent += 1

    def end(self, figures: dict[str, Any]) -> Iterator[bytes]:
        """The whole text."""
        text = "".join(self._texts).strip()
        yield event({"type": "transcript.text.done", "text": text, "usage": self._used()})
