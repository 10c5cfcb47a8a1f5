"""Samples in sound and video files: WAV by the standard library, other kinds by soundfile, ffmpeg or PyAV.

Files come from strangers, to a server too. ffmpeg and PyAV open no other file than the given one: playlists, which name
others, are not among the demuxers that they may use. ffmpeg has a time limit.
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.resampling import BLOCK, Samples, resample

SoundFile = str | os.PathLike[str] | BinaryIO
SPEECH_RATE = 16000
"""Samples a second that every speech model takes."""
SECONDS = 600
"""Time limit of ffmpeg, which decodes some hundred seconds of sound in each second."""
FULL_RATE = 48000 * 2
"""Samples per second of all channels above which a sound counts as longer than its seconds: it takes more memory."""
_UNIT = np.float32(2**-15)  # a sample of 16 bits
_KINDS = (
    "aac,ac3,aiff,amr,asf,au,avi,caf,eac3,flac,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg,w64,wav"
)
_REMEDY = "give a sound or video file such as wav, mp3, m4a, flac, ogg, opus, webm or mp4"


class _OtherKindError(Exception):
    """This reader does not take the file; the text says why."""


def read_samples(file: SoundFile, longest: float | None = None, wanted: int | None = None) -> tuple[Samples, int]:
    """Samples (n,), -1 to 1, and the sampling rate of a sound, or of the best sound track of a video.

    The file is read in blocks: beside the samples that are returned, little memory is needed.

    Args:
        file: path, or an open file that can be read anew from its beginning.
        longest: most seconds; None: any length.
        wanted: samples a second; None: those of the file.

    Raises:
        LoadError: there is no such file, it is empty or damaged, or nothing on this machine reads its kind.
        InputError: it is longer.
    """
    source = Path(file) if isinstance(file, str | os.PathLike) else file
    name = _name(source)
    _check_there(source, name)
    reasons = []
    for reader in (_wave, _soundfile, _ffmpeg):
        if not isinstance(source, Path):
            source.seek(0)
        try:
            samples, rate = reader(source, longest, wanted)
        except _OtherKindError as error:
            reasons.append(str(error))
            continue
        if not len(samples):
            raise LoadError(f"{name} has no samples; give a file with a sound")
        return samples, rate
    known = [reason for reason in reasons if reason]  # "": the reader is not installed
    missing = "" if reasons[-1] else "; for mp3, m4a, webm and mp4 install ffmpeg, or: pip install av"
    raise LoadError(f"{name} is no sound file that can be read ({known[-1]}); {_REMEDY}{missing}")


def _name(source: Path | BinaryIO) -> str:
    return repr(str(source)) if isinstance(source, Path) else "the sound"


def _check_there(source: Path | BinaryIO, name: str) -> None:
    try:
        with source.open("rb") if isinstance(source, Path) else nullcontext(source) as opened:
            empty = not opened.read(1)
    except FileNotFoundError:
        raise LoadError(f"there is no file {name}; check the path") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{name} cannot be read ({getattr(error, 'strerror', error)}); check the path") from None
    if empty:
        raise LoadError(f"{name} is no sound file that can be read (it is empty); {_REMEDY}")


def _check_length(source: Path | BinaryIO, seconds: float, longest: float | None, width: float = 1.0) -> None:
    """Refuse a sound that is too long; ``width``: its samples per second over ``FULL_RATE``."""
    if longest is None or seconds * max(1.0, width) <= longest:
        return
    if seconds > longest:
        raise InputError(f"{_name(source)} is longer than {longest:g} s, the most that is taken; give its parts")
    raise InputError(
        f"{_name(source)} has {width * FULL_RATE:.0f} samples a second, too many for its {seconds:.0f} s; convert it: "
        "ffmpeg -i FILE -ac 1 -ar 16000 sound.wav"
    )


def _joined(blocks: Iterable[Samples], rate: int, wanted: int | None) -> tuple[Samples, int]:
    """Blocks of samples (n,) at another rate, as one array, and that rate."""
    held = bytearray()  # grows in place
    for block in resample(blocks, rate, wanted or rate):
        held += block.tobytes()
    return np.frombuffer(held, np.float32), wanted or rate


def _wave(source: Path | BinaryIO, longest: float | None, wanted: int | None) -> tuple[Samples, int]:
    """WAV files of whole numbers."""
    try:
        with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            with wave.open(file, "rb") as sound:
                channels, width, rate = sound.getnchannels(), sound.getsampwidth(), sound.getframerate()
                if not 1 <= width <= 4 or rate < 1:
                    raise _OtherKindError(f"its samples have {8 * width} bits, {rate} a second")
                # A program that writes into a pipe does not know the length, and puts the largest number.
                frames = min(sound.getnframes(), (size - file.tell()) // (width * channels))
                _check_length(source, frames / rate, longest, rate * channels / FULL_RATE)
                step = max(1, BLOCK // channels)
                parts = (sound.readframes(min(step, frames - at)) for at in range(0, frames, step))
                return _joined((_decoded(part, width, channels) for part in parts), rate, wanted)
    except (wave.Error, EOFError) as error:
        raise _OtherKindError(str(error) or "it ends before it begins") from None


def _decoded(data: bytes, width: int, channels: int) -> Samples:
    """(n,) numbers of -1 to 1 from the whole numbers of a WAV file, little endian, of `width` bytes."""
    count = len(data) // (width * channels) * channels
    wide = np.zeros((count, 4), np.uint8)
    wide[:, 4 - width :] = np.frombuffer(data, np.uint8)[: count * width].reshape(-1, width)
    if width == 1:  # alone without a sign
        wide[:, 3] ^= 0x80
    samples: Samples = (wide.view("<i4") / 2**31).astype(np.float32).reshape(-1, channels).mean(1)
    return samples


def _soundfile(source: Path | BinaryIO, longest: float | None, wanted: int | None) -> tuple[Samples, int]:
    """FLAC, Ogg, MP3, other kinds of WAV."""
    try:
        import soundfile
    except ImportError:
        raise _OtherKindError("") from None
    try:
        with soundfile.SoundFile(source) as sound:
            rate = int(sound.samplerate)
            _check_length(source, sound.frames / rate, longest, rate * sound.channels / FULL_RATE)
            step = max(1, BLOCK // sound.channels)
            blocks = sound.blocks(step, dtype="float32", always_2d=True)
            return _joined((block.mean(1) for block in blocks), rate, wanted)
    except (soundfile.SoundFileError, OSError) as error:
        raise _OtherKindError(" ".join(str(error).rpartition(": ")[2].split())) from None


def _ffmpeg(source: Path | BinaryIO, longest: float | None, wanted: int | None) -> tuple[Samples, int]:
    """Whatever ffmpeg reads, as one channel; without the command, by PyAV."""
    program = shutil.which("ffmpeg")
    if program is None:
        return _pyav(source, longest, wanted)
    with _at_path(source) as path:
        # No "-i pipe:": the index of many mp4 files is at their end.
        command = [program, "-nostdin", "-v", "error", "-protocol_whitelist", "file", "-format_whitelist", _KINDS]
        command += ["-i", f"file:{path}", *(() if longest is None else ("-t", str(longest + 1)))]
        # 16 bits: of floats, ffmpeg's mean of two channels is too loud.
        command += ["-vn", "-ac", "1", "-ar", str(SPEECH_RATE), "-f", "s16le", "pipe:1"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise LoadError(f"ffmpeg took longer than {SECONDS} s to read {_name(source)}; give its parts") from None
        except OSError as error:
            raise _OtherKindError(f"ffmpeg cannot be started: {error.strerror}") from None
    if done.returncode or not done.stdout:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1].replace(f"file:{path}: ", "") if lines else f"exit code {done.returncode}, no samples"
        raise _OtherKindError(f"ffmpeg: {last.strip()}")
    samples = np.frombuffer(done.stdout, "<i2")
    _check_length(source, len(samples) / SPEECH_RATE, longest)
    blocks = (samples[at : at + BLOCK] * _UNIT for at in range(0, len(samples), BLOCK))
    return _joined(blocks, SPEECH_RATE, wanted)


@contextmanager
def _at_path(source: Path | BinaryIO) -> Iterator[Path]:
    """The file's path; for an open file, that of a copy."""
    if isinstance(source, Path):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="sakiyomi-") as folder:
        path = Path(folder) / "sound"
        with path.open("wb") as copy:
            shutil.copyfileobj(source, copy)
        yield path


def _pyav(source: Path | BinaryIO, longest: float | None, wanted: int | None) -> tuple[Samples, int]:
    """The same by the libraries of ffmpeg, which PyAV brings along."""
    try:
        import av
    except ImportError:
        raise _OtherKindError("") from None
    given = f"file:{source}" if isinstance(source, Path) else source

    def blocks() -> Iterator[Samples]:
        resampler, count = av.AudioResampler("s16", "mono", SPEECH_RATE), 0
        try:
            with av.open(given, options={"protocol_whitelist": "file", "format_whitelist": _KINDS}) as container:
                if not container.streams.audio:
                    raise _OtherKindError("it has no sound track")
                for frame in itertools.chain(container.decode(audio=0), (None,)):
                    for made in resampler.resample(frame):
                        yield made.to_ndarray()[0] * _UNIT
                        count += made.samples
                    _check_length(source, count / SPEECH_RATE, longest)
        except av.FFmpegError as error:
            if not count:  # else the file is cut off
                raise _OtherKindError(f"PyAV: {error.strerror}") from None

    return _joined(blocks(), SPEECH_RATE, wanted)
