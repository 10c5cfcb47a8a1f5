"""Files of transcripts, as the command of OpenAI's whisper writes them: txt, srt, vtt, tsv, json."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sakiyomi.core.transcripts import Segment, Transcript, Word


def clock(seconds: float, mark: str = ".", *, hours: bool = False) -> str:
    """A time as 01:02.345, with hours where there are some, or always."""
    whole, thousandths = divmod(round(1000 * seconds), 1000)
    minutes, rest = divmod(whole, 60)
    count, minutes = divmod(minutes, 60)
    ahead = f"{count:02}:" if hours or count else ""
    return f"{ahead}{minutes:02}:{rest:02}{mark}{thousandths:03}"


def txt(transcript: Transcript) -> str:
    """A line for each segment."""
    return "".join(f"{segment.text.strip()}\n" for segment in transcript.segments)


def srt(transcript: Transcript) -> str:
    """SubRip: numbered cues."""
    cues = (
        f"{number}\n{clock(one.start, ',', hours=True)} --> {clock(one.end, ',', hours=True)}\n{_cue(one.text)}\n\n"
        for number, one in enumerate(transcript.segments, start=1)
    )
    return "".join(cues)


def vtt(transcript: Transcript) -> str:
    """WebVTT."""
    cues = (f"{clock(one.start)} --> {clock(one.end)}\n{_cue(one.text)}\n\n" for one in transcript.segments)
    return "WEBVTT\n\n" + "".join(cues)


def tsv(transcript: Transcript) -> str:
    """Tab-separated: start and end in whole milliseconds, text."""
    rows = (f"{round(1000 * s.start)}\t{round(1000 * s.end)}\t{_row(s.text)}\n" for s in transcript.segments)
    return "start\tend\ttext\n" + "".join(rows)


def verbose(transcript: Transcript) -> dict[str, Any]:
    """Whisper's JSON object, with task and duration as OpenAI's ``verbose_json`` has them."""
    return {
        "task": transcript.task,
        "language": transcript.language,
        "duration": round(transcript.seconds, 2),
        "text": transcript.text,
        "segments": [_segment(i, segment) for i, segment in enumerate(transcript.segments)],
    }


def words(transcript: Transcript) -> list[dict[str, Any]]:
    """The words of all segments, as OpenAI's ``verbose_json`` has them."""
    return [_word(word) for segment in transcript.segments for word in segment.words]


WRITERS: dict[str, Callable[[Transcript], str]] = {
    "txt": txt,
    "srt": srt,
    "vtt": vtt,
    "tsv": tsv,
    "json": lambda transcript: json.dumps(verbose(transcript), ensure_ascii=False) + "\n",
}
"""What makes a file's text, by the ending of its name."""


def _cue(text: str) -> str:
    # An arrow, or an empty line, would end the cue.
    return "\n".join(line for line in text.strip().replace("-->", "->").splitlines() if line.strip())


def _row(text: str) -> str:
    return " ".join(text.split())


def _segment(number: int, segment: Segment) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": number,
        "seek": segment.seek,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.average_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_probability,
    }
    return found | ({"words": [_word(word) | {"word": word.text} for word in segment.words]} if segment.words else {})


def _word(word: Word) -> dict[str, Any]:
    return {
        "word": word.text.strip(),
        "start": round(word.start, 3),
        "end": round(word.end, 3),
        "probability": round(word.probability, 4),
    }
