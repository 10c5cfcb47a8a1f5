"""``sakiyomi transcribe``: the text of sound and video files, by a speech model."""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sakiyomi.cli.common import JsonOption, load
from sakiyomi.cli.output import note, progress, stdout, write
from sakiyomi.core.errors import InputError, SakiyomiError
from sakiyomi.core.files import whole_file
from sakiyomi.core.subtitles import WRITERS, clock, verbose
from sakiyomi.core.transcripts import Segment, Transcript, TranscriptionParams
from sakiyomi.engine.config import LLMConfig

if TYPE_CHECKING:
    from sakiyomi.core.audio import Audio
    from sakiyomi.engine.llm import LLM

STDIN = "-"
FORMATS = (*WRITERS, "all")


@dataclass(frozen=True)
class TranscribeOptions:
    """What to transcribe, and where to write it.

    Attributes:
        files: sound or video files; - reads one from stdin. FLAC, Ogg and MP3 need soundfile, other kinds than those
            and WAV need ffmpeg or PyAV.
        format: txt, srt, vtt, tsv, json or all.
        output_dir: folder for the files of this format, which are called as the sounds are; by default one format is
            written to stdout.
    """

    files: tuple[str, ...] = field(default=(), metadata={"argument": "FILE"})
    format: str = "txt"
    output_dir: str | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InputError(f"format is {self.format!r}; expected {', '.join(FORMATS)}")
        if self.output_dir is None and self.format == "all":
            raise InputError("format is all, and several files cannot be written to stdout; give --output-dir")
        if self.output_dir is None and self.format != "txt" and len(self.files) > 1:
            raise InputError(f"{len(self.files)} files cannot be written to stdout as {self.format}; give --output-dir")
        stems: dict[str, str] = {}
        for name in self.files:
            if (other := stems.setdefault(_stem(name), name)) != name and self.output_dir is not None:
                raise InputError(
                    f"{other!r} and {name!r} would be written to one file, {_stem(name)}.{self.format}; transcribe "
                    "them into different folders"
                )

    @property
    def endings(self) -> Sequence[str]:
        """Of the files for each sound."""
        return [*WRITERS] if self.format == "all" else [self.format]


def transcribe(options: TranscribeOptions, params: TranscriptionParams, model: LLMConfig, output: JsonOption) -> None:
    """Transcribe sound and video files.

    The target is a speech model (whisper); the output is its own, and a smaller model as draft makes it faster. The
    text is printed segment by segment. A file that cannot be read does not stop the others; the exit code is then 1.

    Example: sakiyomi transcribe talk.mp3 --model whisper-tiny --format srt --output-dir subtitles
    """
    if not options.files:
        raise InputError("no file was given; expected one or more, for instance: sakiyomi transcribe speech.wav")
    found: dict[str, dict[str, Any]] = {}

    def fails(name: str, error: SakiyomiError) -> None:
        note(f"error: {error.message}")
        found[name] = {"file": name, "error": error.message}

    sounds = _sounds(options.files, fails)
    first = next(sounds, None)  # before the model, which takes longer
    if first is not None:
        llm = load(model)
        for name, sound in itertools.chain([first], sounds):
            try:
                transcript = _transcribed(llm, name, sound, params, _printer(options, params, output))
                _write(options, name, transcript, output)
            except SakiyomiError as error:
                fails(name, error)
            else:
                found[name] = {"file": name} | verbose(transcript)
    output.emit({"target": model.target, "draft": model.draft, "files": [found[name] for name in options.files]})
    if any("error" in one for one in found.values()):
        raise typer.Exit(1)


def _stem(name: str) -> str:
    return "stdin" if name == STDIN else Path(name).stem


def _sounds(names: Sequence[str], fails: Callable[[str, SakiyomiError], None]) -> Iterator[tuple[str, Audio]]:
    """The sounds that can be read, each read when it is its turn."""
    from sakiyomi.core.audio import Audio

    for name in names:
        try:
            yield name, Audio.read(io.BytesIO(sys.stdin.buffer.read()) if name == STDIN else name)
        except SakiyomiError as error:
            fails(name, error)


def _transcribed(
    llm: LLM, name: str, sound: Audio, params: TranscriptionParams, show: Callable[[Segment], None]
) -> Transcript:
    """The transcript; ``show`` gets each segment when it is known."""
    from sakiyomi.engine.transcription import Transcriber

    began = time.perf_counter()

    def speed(seconds: float) -> str:
        return f"{seconds / (time.perf_counter() - began):.1f}x real time"

    segments: list[Segment] = []
    with progress(f"{name}: 0 of {sound.seconds:.0f} s") as status:
        begun = Transcriber(llm).begin(sound, params)
        while not begun.over:
            fresh = begun.take(*llm.engine.complete([begun.submit()]))
            status.stop()  # or its line would be in the way
            for segment in fresh:
                show(segment)
            status.start()
            segments += fresh
            if fresh:
                status.update(f"{name}: {fresh[-1].end:.0f} of {sound.seconds:.0f} s, {speed(fresh[-1].end)}")
    note(f"{name}: {sound.seconds:.0f} s of sound, {speed(sound.seconds)}")
    return begun.transcript(segments)


def _printer(options: TranscribeOptions, params: TranscriptionParams, output: JsonOption) -> Callable[[Segment], None]:
    """Prints a segment; with its times on a terminal."""
    console = stdout()
    silent = output.json or (options.output_dir is None and options.format != "txt")

    def show(segment: Segment) -> None:
        times = f"[{clock(segment.start)} --> {clock(segment.end)}] "
        if not silent:
            shown = console.is_terminal and params.timestamps != "none"
            write(console, f"{times if shown else ''}{segment.text.strip()}", end="\n")

    return show


def _write(options: TranscribeOptions, name: str, transcript: Transcript, output: JsonOption) -> None:
    """The files of a transcript, or its text on stdout where that was not printed before."""
    for ending in options.endings:
        text = WRITERS[ending](transcript)
        if options.output_dir is not None:
            with whole_file(
                Path(options.output_dir) / f"{_stem(name)}.{ending}", "choose another --output-dir"
            ) as path:
                path.write_text(text, encoding="utf-8")
        elif ending != "txt" and not output.json:
            write(stdout(), text)
