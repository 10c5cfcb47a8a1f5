"""Texts of sounds over HTTP: those of the library, by the real client, whole and streamed, long ones in parts."""

from __future__ import annotations

import copy
import io
import threading
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from sakiyomi import LLM, SamplingParams
from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError
from sakiyomi.server.transcriptions import read_form
from seq2seq_toys import MELS, TOKENIZER, model_of
from server_toys import client, running, web

RATE, HOP = 16000, 160
LANGUAGES = {"<|en|>": 40, "<|fr|>": 41}
SETTINGS: dict[str, Any] = {"lang_to_id": LANGUAGES, "is_multilingual": True, "no_timestamps_token_id": 55}
SETTINGS["task_to_id"] = {"transcribe": 50, "translate": 51}


class Processor:
    """A tokenizer and a feature extractor in one, whose window is a second."""

    def __init__(self) -> None:
        self.tokenizer, self.decode = TOKENIZER, TOKENIZER.decode
        self.feature_extractor = WhisperFeatureExtractor(
            feature_size=MELS, sampling_rate=RATE, hop_length=HOP, chunk_length=1, n_fft=400
        )


def llm_of(draft: str = "early-exit:1", name: str = "whisper", **options: Any) -> LLM:
    model = copy.deepcopy(model_of(name))
    for key, value in SETTINGS.items():
        setattr(model.generation_config, key, value)
    return LLM((model, Processor() if name == "whisper" else TOKENIZER), draft, compile=False, **options)


def sound(seconds: float, hertz: float = 300.0, *, language: str | None = None, task: str | None = None) -> Audio:
    """Tones with pauses: cut at silences, parts differ."""
    times = np.arange(int(seconds * RATE)) / RATE
    samples = np.sin(2 * np.pi * hertz * (1 + np.floor(times)) * times) * (times % 1 < 0.7)
    return Audio((0.5 * samples).astype(np.float32), RATE, language, task)


def file_of(audio: Audio) -> bytes:
    found = io.BytesIO()
    with wave.open(found, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(audio.sampling_rate)
        file.writeframes((audio.samples * 32767).astype("<i2").tobytes())
    return found.getvalue()


def wanted(llm: LLM, audio: Audio) -> list[str]:
    """The library's texts of the parts of what is in the file."""
    read = Audio.read(io.BytesIO(file_of(audio)), language=audio.language, task=audio.task)
    done = llm.generate(read.split(1.0, at_silences=True), SamplingParams(max_new_tokens=1 << 20))
    return [out.text for out in done]


@pytest.fixture(scope="module")
def own() -> LLM:
    return llm_of("none")


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with running(llm_of(max_batch=2)) as (_, url):
        yield url


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.6, 3.4])
def test_a_client_gets_the_librarys_text(site: str, own: LLM, seconds: float) -> None:
    api, audio = client(site), sound(seconds)
    parts = wanted(own, audio)
    assert (len(parts) > 1) == (seconds > 1)
    text = "".join(parts).strip()
    send = ("speech.wav", file_of(audio))
    assert api.audio.transcriptions.create(model="toy", file=send).text == text
    plain = api.audio.transcriptions.create(model="toy", file=send, response_format="text")
    assert plain == text + "\n"
    whole = api.audio.transcriptions.create(
        model="toy", file=send, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert whole.text == text and whole.duration == pytest.approx(audio.seconds, abs=0.01)
    assert [part.text for part in whole.segments or ()] == parts
    ends = [(part.start, part.end) for part in whole.segments or ()]
    assert ends[0][0] == 0 and ends[-1][1] == whole.duration and [a[1] for a in ends[:-1]] == [b[0] for b in ends[1:]]
    events = list(api.audio.transcriptions.create(model="toy", file=send, stream=True))
    assert "".join(event.delta for event in events[:-1]).strip() == text == events[-1].text
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}


@pytest.mark.thorough
def test_language_and_task_are_those_that_were_asked_for(site: str, own: LLM) -> None:
    api, send = client(site), ("a.wav", file_of(sound(0.5)))
    for language in ("fr", "en"):
        reply = api.audio.transcriptions.create(model="toy", file=send, language=language)
        assert reply.text == wanted(own, sound(0.5, language=language))[0].strip()
    # The client's own function says that it is deprecated.
    reply = web.post(f"{site}/v1/audio/translations", files={"file": send}, timeout=60)
    assert reply.json()["text"] == wanted(own, sound(0.5, task="translate"))[0].strip()


@pytest.mark.thorough
def test_many_at_once_do_not_disturb_each_other(site: str, own: LLM) -> None:
    """Features are made in several threads, languages heard between rounds."""
    sounds = [sound(0.4 + 0.3 * i, 200.0 + 90 * i) for i in range(6)]
    expected = ["".join(wanted(own, audio)).strip() for audio in sounds]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        files = {"file": ("a.wav", file_of(sounds[i]))}
        found[i] = web.post(f"{site}/v1/audio/transcriptions", files=files, timeout=120).json()["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == expected and len(set(expected)) > 1


@pytest.mark.parametrize(
    ("fields", "data", "words", "param"),
    [
        ({}, b"no sound", "is no sound file that can be read", "file"),
        ({}, b"", "is no sound file that can be read", "file"),
        ({"language": "klingon"}, None, "the model knows en, fr", None),
        ({"response_format": "srt"}, None, "response_format", "response_format"),
        ({"temperature": "hot"}, None, "temperature", "temperature"),
        ({"prompt": "Dear"}, None, "prompt", "prompt"),
        ({"model": "other"}, None, "there is no model 'other'", "model"),
        ({"stream": "true", "response_format": "text"}, None, "leave response_format out", "response_format"),
    ],
)
def test_what_cannot_be_met_is_refused(
    site: str, fields: dict[str, str], data: bytes | None, words: str, param: str | None
) -> None:
    files = {"file": ("a.wav", file_of(sound(0.2)) if data is None else data)}
    reply = web.post(f"{site}/v1/audio/transcriptions", data=fields, files=files, timeout=60)
    assert reply.status_code in (400, 404), reply.text
    assert words in reply.json()["error"]["message"] and reply.json()["error"]["param"] == param


def test_other_paths_name_the_right_one(site: str) -> None:
    reply = web.post(f"{site}/v1/completions", json={"prompt": "A fox"})
    assert reply.status_code == 400 and "send sounds to /v1/audio/transcriptions" in reply.text
    (card,) = web.get(f"{site}/v1/models").json()["data"]
    assert card["audio"] and not card["images"]
    for body, kind in ((b"{}", "application/json"), (b"x", "multipart/form-data; boundary=b")):
        reply = web.post(f"{site}/v1/audio/transcriptions", content=body, headers={"content-type": kind})
        assert reply.status_code == 400 and "curl -F file=" in reply.text
    reply = web.post(f"{site}/v1/audio/transcriptions", files={"model": (None, "toy")})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "file"


def test_a_sound_that_is_too_long_is_refused_by_its_header() -> None:
    with running(llm_of("none", max_batch=1), max_audio_seconds=2.0) as (_, url):
        files = {"file": ("a.wav", file_of(sound(3.0)))}
        reply = web.post(f"{url}/v1/audio/transcriptions", files=files)
        assert reply.status_code == 400 and "this server takes 2 s" in reply.text


def test_models_that_read_texts_are_no_speech_models() -> None:
    from server_toys import toy_llm

    with running(toy_llm("none")) as (_, url):
        reply = web.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", b"x")})
        assert reply.status_code == 400 and "is no speech model" in reply.text
    with pytest.raises(UnsupportedError, match="an encoder that reads text"):
        Server(llm_of("none", "bart"), ServerConfig())


def test_forms() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--b\r\ncontent-disposition: form-data; name=f; '
    )
    body += b'filename="x"\r\nContent-Type: audio/wav\r\n\r\n\x00\r\n\r\n--c\r\n--b--\r\n'
    assert read_form(body, "multipart/form-data; boundary=b") == {"a": [b"1"], "f": [b"\x00\r\n\r\n--c"]}
    for broken in (b"", body[:-6], b"x" + body, body.replace(b"name", b"nam"), body.replace(b"\r\n\r\n1", b"")):
        with pytest.raises(ApiError):
            read_form(broken, "multipart/form-data; boundary=b")
