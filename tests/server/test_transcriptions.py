"""Texts of sounds over HTTP: those of the library, by the real client, in every form, whole and streamed."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sakiyomi import LLM
from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import DivergedError, UnsupportedError
from sakiyomi.core.subtitles import WRITERS, verbose, words
from sakiyomi.core.transcripts import Transcript, TranscriptionParams
from sakiyomi.engine.transcription import SoundInWork, Transcriber
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError
from sakiyomi.server.metrics import Metrics
from sakiyomi.server.relay import Relay, Sent
from sakiyomi.server.transcriptions import Hearing, Transcription, TranscriptionForm, read_form
from sakiyomi.server.worker import Worker
from seq2seq_toys import TOKENIZER, model_of
from server_toys import client, running, web
from speech_toys import HEADS, noise, speech_llm, wav

WARM = {"temperature": "0.01", "seed": "3"}
"""One temperature, as texts of random weights are poor and would be tried again."""


def wanted(llm: LLM, audio: Audio, **params: Any) -> Transcript:
    """The library's transcript of what is in the file."""
    asked = TranscriptionParams(**({"timestamps": "none", "seed": 3, "temperatures": (0.01,)} | params))
    found: Transcript = llm.transcribe(Audio.read(io.BytesIO(wav(audio))), asked)
    return found


@pytest.fixture(scope="module")
def own() -> LLM:
    return speech_llm(settings={"alignment_heads": HEADS})


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with running(speech_llm("early-exit:1", {"alignment_heads": HEADS}, max_batch=2)) as (_, url):
        yield url


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.8, 3.4])
def test_a_client_gets_the_librarys_text(site: str, own: LLM, seconds: float) -> None:
    api, audio = client(site), noise(seconds)
    create, send = api.audio.transcriptions.create, {"model": "toy", "file": ("speech.wav", wav(audio))}
    send |= {"temperature": 0.01, "extra_body": {"seed": 3}}
    plain, timed = wanted(own, audio), wanted(own, audio, timestamps="segment")
    assert len(timed.segments) > (seconds > 1)
    assert create(**send).text == plain.text
    assert create(**send, response_format="text") == plain.text + "\n"
    for name in ("srt", "vtt"):
        assert create(**send, response_format=name) == WRITERS[name](timed)
    whole = create(**send, response_format="verbose_json", timestamp_granularities=["segment"]).to_dict()
    assert whole.pop("usage") == {"type": "duration", "seconds": round(audio.seconds, 2)}
    assert whole == json.loads(json.dumps(verbose(timed)))
    events = list(create(**send, stream=True))
    assert "".join(event.delta for event in events[:-1]).strip() == plain.text == events[-1].text
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    *events, last = create(**send, stream=True, response_format="verbose_json")
    assert [event.delta for event in events[::2]] == [segment.text for segment in timed.segments]
    assert [event.type for event in events[1::2]] == ["transcript.text.segment"] * len(timed.segments)
    assert [event.end for event in events[1::2]] == [one["end"] for one in whole["segments"]]
    assert last.to_dict()["segments"] == whole["segments"]


@pytest.mark.thorough
def test_words_come_where_they_are_asked_for(site: str, own: LLM) -> None:
    audio = noise(0.6)
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word"], **WARM}
    files = {"file": ("a.wav", wav(audio))}
    found = web.post(f"{site}/v1/audio/transcriptions", data=fields, files=files).json()
    timed = wanted(own, audio, timestamps="word")
    assert len(found["words"]) > 1
    assert found["words"] == words(timed) and "segments" not in found and found["text"] == timed.text
    fields["timestamp_granularities[]"] = ["word", "segment"]
    both = web.post(f"{site}/v1/audio/transcriptions", data=fields, files=files).json()
    assert both["words"] == found["words"] and [one["text"] for one in both["segments"]] == [
        segment.text for segment in timed.segments
    ]
    assert all("words" not in segment for segment in both["segments"])


@pytest.mark.thorough
def test_the_form_says_how(site: str, own: LLM) -> None:
    send = {"file": ("a.wav", wav(noise(0.5)))}
    texts = set()
    for path, fields, params in (
        ("transcriptions", {"language": "fr"}, {"language": "fr"}),
        ("transcriptions", {"language": "english"}, {"language": "en"}),
        ("transcriptions", {"temperature": "0.9"}, {"temperatures": (0.9,)}),
        ("translations", {}, {"task": "translate"}),
    ):
        reply = web.post(f"{site}/v1/audio/{path}", data=WARM | fields, files=send)
        texts.add(reply.json()["text"])
        assert reply.json()["text"] == wanted(own, noise(0.5), **params).text, (path, fields)
    assert len(texts) > 2


@pytest.mark.thorough
def test_many_at_once_do_not_disturb_each_other(site: str, own: LLM) -> None:
    sounds = [noise(0.4 + 0.3 * i, i) for i in range(6)]
    expected = [wanted(own, audio).text for audio in sounds]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        files = {"file": ("a.wav", wav(sounds[i]))}
        found[i] = web.post(f"{site}/v1/audio/transcriptions", data=WARM, files=files, timeout=120).json()["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == expected and len(set(expected)) > 1


@pytest.mark.thorough
def test_a_sound_with_many_windows_needs_one_place(own: LLM) -> None:
    """Its windows follow from each other; only the first one asks whether there is room."""
    audio = noise(3.4)
    with running(speech_llm(max_batch=1), max_queue=0) as (server, url):
        files = {"file": ("a.wav", wav(audio))}
        reply = web.post(f"{url}/v1/audio/transcriptions", data=WARM, files=files)
        assert reply.json()["text"] == wanted(own, audio).text
        assert server.worker.load == 0


@pytest.mark.thorough
def test_a_client_that_leaves_ends_its_sound(own: LLM) -> None:
    taken: list[SoundInWork] = []
    take = SoundInWork.take

    def noted(sound: SoundInWork, *arguments: Any) -> Any:
        taken.append(sound)
        return take(sound, *arguments)

    with pytest.MonkeyPatch.context() as patch, running(speech_llm(max_batch=1)) as (server, url):
        patch.setattr(SoundInWork, "take", noted)
        files = {"file": ("a.wav", wav(noise(40.0)))}
        fields = WARM | {"stream": "true"}
        with web.stream("POST", f"{url}/v1/audio/transcriptions", data=fields, files=files) as reply:
            next(reply.iter_lines())
        short = web.post(f"{url}/v1/audio/transcriptions", data=WARM, files={"file": ("a.wav", wav(noise(0.3)))})
        assert short.json()["text"] == wanted(own, noise(0.3)).text and server.worker.load == 0
    assert 1 < len(taken) < 30, "a sound of 40 windows was read to its end"


def test_the_engines_thread_runs_what_it_is_given_until_it_is_stopped(own: LLM) -> None:
    async def asked() -> list[Any]:
        worker = Worker(own.engine, max_queue=1, reuse=False, metrics=Metrics("toy", None))
        worker.start()
        leaving = asyncio.ensure_future(worker.run(lambda: time.sleep(0.2)))
        await asyncio.sleep(0.05)
        leaving.cancel()
        found: list[Any] = [await worker.run(threading.get_ident)]
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 / 0)
        last = asyncio.ensure_future(worker.run(lambda: "last"))
        await asyncio.sleep(0)
        worker.stop()
        with pytest.raises(ApiError, match="stop"):
            await worker.run(lambda: "late")
        return [*found, await last]

    thread, last = asyncio.run(asyncio.wait_for(asked(), 20))
    assert thread != threading.get_ident() and last == "last"


@pytest.mark.thorough
def test_another_server_continues_a_stream(own: LLM) -> None:
    """It sends neither a segment again, nor a text after which other words were sent."""
    audio = noise(3.4)
    params = TranscriptionParams(temperatures=(0.01,), seed=3)
    segments = own.transcribe(audio, params).segments
    asked = Transcription(TranscriptionForm(response_format="verbose_json"), b"", params)

    async def sent(given: list[Sent]) -> list[str]:
        worker = Worker(own.engine, max_queue=1, reuse=False, metrics=Metrics("toy", None))
        worker.start()
        begin = functools.partial(Transcriber(own).begin, audio, params)
        try:
            found = [data.decode() async for data in Hearing(worker, begin, "").events(asked, Relay(given=given))]
        finally:
            worker.stop()
            worker.join(10)
        return found

    given = [Sent(0, segment.tokens, False) for segment in segments]
    whole = asyncio.run(sent([]))
    assert len(whole) == len(segments) + 1 > 3
    assert asyncio.run(sent(given[:2])) == whole[2:]
    with pytest.raises(DivergedError, match="segment 1 is"):
        asyncio.run(sent([given[0], Sent(0, (1, 2, 3), False)]))


@pytest.mark.parametrize(
    ("fields", "data", "words", "param"),
    [
        ({}, b"no sound", "is no sound file that can be read", "file"),
        ({}, b"", "it is empty", "file"),
        ({"language": "klingon"}, None, "the model knows en, fr", None),
        ({"response_format": "lrc"}, None, "response_format", "response_format"),
        ({"temperature": "hot"}, None, "temperature", "temperature"),
        ({"length": "9"}, None, "length", "length"),
        ({"timestamp_granularities[]": "word"}, None, "ask for verbose_json", "timestamp_granularities"),
        ({"model": "other"}, None, "there is no model 'other'", "model"),
        ({"stream": "true", "response_format": "text"}, None, "leave response_format out", "response_format"),
    ],
)
def test_what_cannot_be_met_is_refused(
    site: str, fields: dict[str, str], data: bytes | None, words: str, param: str | None
) -> None:
    files = {"file": ("a.wav", wav(noise(0.2)) if data is None else data)}
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
    with running(speech_llm(max_batch=1), max_audio_seconds=2.0) as (_, url):
        files = {"file": ("a.wav", wav(noise(3.0)))}
        reply = web.post(f"{url}/v1/audio/transcriptions", files=files)
        assert reply.status_code == 400 and "longer than 2 s" in reply.text


def test_models_that_read_texts_are_no_speech_models() -> None:
    from server_toys import toy_llm

    with running(toy_llm("none")) as (_, url):
        reply = web.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", b"x")})
        assert reply.status_code == 400 and "is no speech model" in reply.text
    with pytest.raises(UnsupportedError, match="an encoder that reads text"):
        Server(LLM((model_of("bart"), TOKENIZER), "none", compile=False), ServerConfig())


def test_forms() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--b\r\ncontent-disposition: form-data; name=f; '
    )
    body += b'filename="x"\r\nContent-Type: audio/wav\r\n\r\n\x00\r\n\r\n--c\r\n--b--\r\n'
    assert read_form(body, "multipart/form-data; boundary=b") == {"a": [b"1"], "f": [b"\x00\r\n\r\n--c"]}
    for broken in (b"", body[:-6], b"x" + body, body.replace(b"name", b"nam"), body.replace(b"\r\n\r\n1", b"")):
        with pytest.raises(ApiError):
            read_form(broken, "multipart/form-data; boundary=b")
