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
    from sakiyomi.engine.transcription import SoundInWork

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

    @property
    def place(self) -> str:
        """Where a transcript is then."""
        return "on stdout" if self.output_dir is None else f"in {self.output_dir}"


def transcribe(options: TranscribeOptions, params: TranscriptionParams, model: LLMConfig, output: JsonOption) -> None:
    """Transcribe sound and video files.

    The target is a speech model (whisper); the output is its own, and a smaller model as draft makes it faster. The
    text is printed segment by segment. A file that cannot be read does not stop the others; the exit code is then 1.
    After Ctrl-C the output holds what was said until then; an earlier file stays, with NAME.partial beside it.

    Example: sakiyomi transcribe talk.mp3 --model whisper-tiny --format srt --output-dir subtitles
    """
    if not options.files:
        raise InputError("no file was given; expected one or more, for instance: sakiyomi transcribe speech.wav")
    found: dict[str, dict[str, Any]] = {}

    def fails(name: str, error: SakiyomiError) -> None:
        note(f"error: {error.message}")
        found[name] = {"file": name, "error": error.message}

    def emit() -> None:
        files = [found[name] for name in options.files if name in found]
        output.emit({"target": model.target, "draft": model.draft, "files": files})

    sounds = _sounds(options.files, fails)
    ready = list(itertools.islice(sounds, 1))  # before the model, which takes longer
    if ready:
        from sakiyomi.engine.transcription import Transcriber

        llm = load(model)
    while ready:
        name, sound = ready.pop()
        stopped = ""
        try:
            begun = Transcriber(llm).begin(sound, params)
            del sound  # an hour of samples is 230 MB
            transcript, stopped = _transcribed(name, begun, _printer(options, params, output))
            if transcript.segments or not stopped:
                _write(options, name, transcript, output, whole=not stopped)
        except SakiyomiError as error:
            fails(name, error)
        else:
            found[name] = {"file": name} | ({"error": stopped} if stopped else {}) | verbose(transcript)
            if stopped:
                said = f", and what was said until then is {options.place}" if transcript.segments else ""
                note(f"{name}: {stopped}{said}")
        if stopped:
            emit()
            raise KeyboardInterrupt
        ready += itertools.islice(sounds, 1)
    emit()
    if any("error" in one for one in found.values()):
        raise typer.Exit(1)
    llm.record()


def _stem(name: str) -> str:
    return "stdin" if name == STDIN else Path(name).stem


def _sounds(names: Sequence[str], fails: Callable[[str, SakiyomiError], None]) -> Iterator[tuple[str, Audio]]:
    """The sounds that can be read, each read when it is its turn."""
    from sakiyomi.core.audio import Audio
    from sakiyomi.core.sound_files import SPEECH_RATE

    for name in names:
        try:
            file = io.BytesIO(sys.stdin.buffer.read()) if name == STDIN else name
            yield name, Audio.read(file, sampling_rate=SPEECH_RATE)
        except SakiyomiError as error:
            fails(name, error)


def _transcribed(name: str, begun: SoundInWork, show: Callable[[Segment], None]) -> tuple[Transcript, str]:
    """The transcript, and after Ctrl-C where it stopped; ``show`` gets each segment when it is known."""
    began = time.perf_counter()

    def speed(seconds: float) -> str:
        return f"{seconds / (time.perf_counter() - began):.1f}x real time"

    segments: list[Segment] = []
    try:
        with progress(f"{name}: 0 of {begun.seconds:.0f} s") as status:
            for _, fresh in begun.tries():
                status.stop()  # or its line would be in the way
                for segment in fresh:
                    show(segment)
                    segments.append(segment)
                status.start()
                status.update(f"{name}: {begun.position:.0f} of {begun.seconds:.0f} s, {speed(begun.position)}")
    except KeyboardInterrupt:
        return begun.transcript(segments), f"stopped at {clock(begun.position)} of {clock(begun.seconds)}"
    note(f"{name}: {begun.seconds:.0f} s of sound, {speed(begun.seconds)}")
    return begun.transcript(segments), ""


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


def _write(options: TranscribeOptions, name: str, transcript: Transcript, output: JsonOption, *, whole: bool) -> None:
    """The files of a transcript, or its text on stdout where that was not printed before.

    One that is not whole goes beside an earlier file of that name.
    """
    for ending in options.endings:
        text = WRITERS[ending](transcript)
        if options.output_dir is not None:
            place = Path(options.output_dir) / f"{_stem(name)}.{ending}"
            if not whole and place.exists():
                place = place.with_name(f"{_stem(name)}.partial.{ending}")
            with whole_file(place, "choose another --output-dir") as path:
                path.write_text(text, encoding="utf-8")
        elif ending != "txt" and not output.json:
            write(stdout(), text)
