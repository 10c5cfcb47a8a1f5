"""Files of transcripts: the very bytes that whisper's own command writes for the same segments."""

from __future__ import annotations

import json

from sakiyomi.core.subtitles import WRITERS, clock, verbose, words
from sakiyomi.core.transcripts import Segment, Transcript, Word

SAID = Transcript(
    (
        Segment(0.0, 1.5, " Hello --> you.", (1, 2), 0.0, -0.25, 1.1, 0.01, (Word(" Hello", 0.0, 0.75, 0.9),)),
        Segment(3661.2345, 3662.0, " A\ttab,\n\nand lines.", seek=366000),
    ),
    3663.0,
    "en",
)


def test_files() -> None:
    assert WRITERS["txt"](Transcript(SAID.segments[:1], 2.0)) == "Hello --> you.\n"
    assert WRITERS["srt"](SAID) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello -> you.\n\n2\n01:01:01,234 --> 01:01:02,000\nA\ttab,\nand lines.\n\n"
    )
    assert WRITERS["vtt"](SAID) == (
        "WEBVTT\n\n00:00.000 --> 00:01.500\nHello -> you.\n\n01:01:01.234 --> 01:01:02.000\nA\ttab,\nand lines.\n\n"
    )
    assert WRITERS["tsv"](SAID) == "start\tend\ttext\n0\t1500\tHello --> you.\n3661234\t3662000\tA tab, and lines.\n"
    nothing = Transcript((), 1.0)
    assert [write(nothing) for write in WRITERS.values()][:4] == ["", "", "WEBVTT\n\n", "start\tend\ttext\n"]


def test_json() -> None:
    found = json.loads(WRITERS["json"](SAID))
    assert found == json.loads(json.dumps(verbose(SAID)))
    assert (found["language"], found["task"], found["duration"]) == ("en", "transcribe", 3663.0)
    assert found["text"] == "Hello --> you. A\ttab,\n\nand lines."
    first, second = found["segments"]
    assert "words" not in second and second["seek"] == 366000
    assert first == {
        "id": 0, "seek": 0, "start": 0.0, "end": 1.5, "text": " Hello --> you.", "tokens": [1, 2], "temperature": 0.0,
        "avg_logprob": -0.25, "compression_ratio": 1.1, "no_speech_prob": 0.01,
        "words": [{"word": " Hello", "start": 0.0, "end": 0.75, "probability": 0.9}],
    }  # fmt: skip
    assert words(SAID) == [{"word": "Hello", "start": 0.0, "end": 0.75, "probability": 0.9}]


def test_clock() -> None:
    assert [clock(59.9996), clock(3600.0), clock(0.0, ",", hours=True)] == ["01:00.000", "01:00:00.000", "00:00:00,000"]
