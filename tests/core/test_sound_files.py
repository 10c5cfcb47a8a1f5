"""Sound files as people have them, read by each reader; and files that are none."""

from __future__ import annotations

import io
import shutil
import sys
import wave
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakiyomi import Audio, InputError, LoadError
from sakiyomi.core import sound_files

av = pytest.importorskip("av")
WRITE = "w"  # to PyAV, which writes bytes
RATE = 48000
SOUNDFILE, LIBRARIES = ("a.flac", "a.ogg", "a.mp3", "floats.wav"), ("a.m4a", "a.webm", "a.mp4", "a.mkv")
CODECS = {"m4a": "aac", "mp4": "aac", "webm": "libopus", "mkv": "flac"}


def tone(seconds: float = 0.5) -> Any:
    """440 Hz on the left, twice as loud as on the right."""
    one = 0.4 * np.sin(2 * np.pi * 440 * np.arange(int(RATE * seconds)) / RATE)
    return np.stack([one, one / 2], 1).astype(np.float32)


def encoded(path: Path, samples: Any, *, video: bool = False) -> None:
    """A file by PyAV; ``video``: with pictures, too."""
    with av.open(str(path), WRITE) as container:
        pictures = container.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p") if video else None
        tone = None if samples is None else container.add_stream(CODECS[path.suffix[1:]], rate=RATE, layout="stereo")
        if pictures is not None:
            container.mux([*pictures.encode(av.VideoFrame(32, 32, "yuv420p")), *pictures.encode(None)])
        if tone is not None:
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="fltp", layout="stereo")
            frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), 0
            made = av.AudioResampler(tone.format, tone.layout, RATE, tone.frame_size or None)
            for part in (*made.resample(frame), *made.resample(None), None):
                container.mux(tone.encode(part))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    soundfile, folder = pytest.importorskip("soundfile"), tmp_path_factory.mktemp("sounds")
    for name in SOUNDFILE:
        soundfile.write(folder / name, tone(), RATE, subtype="FLOAT" if name == "floats.wav" else None)
    for name in LIBRARIES:
        encoded(folder / name, tone(), video=name in ("a.mp4", "a.mkv"))
    encoded(folder / "silent.mp4", None, video=True)
    return folder


@pytest.fixture(params=["ffmpeg", "pyav"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What reads the kinds that soundfile does not read."""
    if request.param == "pyav":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    return str(request.param)


def opened(path: Path) -> io.BytesIO:
    return io.BytesIO(path.read_bytes())


def check(sound: Audio) -> None:
    """It is the tone: its length, its loudest frequency, and the mean of its channels."""
    assert sound.seconds == pytest.approx(0.5, abs=0.06)
    found = np.abs(np.fft.rfft(sound.samples))
    assert found.argmax() / sound.seconds == pytest.approx(440, abs=5)
    inner = sound.samples[len(sound.samples) // 4 : len(sound.samples) // 2]
    assert np.sqrt((inner**2).mean()) == pytest.approx(0.3 / np.sqrt(2), rel=0.05)


@pytest.mark.parametrize("name", SOUNDFILE)
def test_soundfile_reads(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_files, "_ffmpeg", None)  # is not asked
    for way in (Path, opened):
        sound = Audio.read(way(files / name))  # type: ignore[operator]
        assert sound.sampling_rate == RATE
        check(sound)


@pytest.mark.parametrize("way", [Path, opened])
@pytest.mark.parametrize("name", LIBRARIES)
def test_ffmpeg_and_pyav_read(name: str, way: Callable[[Path], Any], reader: str, files: Path) -> None:
    sound = Audio.read(way(files / name))
    assert sound.sampling_rate == 16000
    check(sound)


def test_a_wav_file_from_a_pipe_does_not_know_its_length() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"\0\1" * 4000)
    data = bytearray(file.getvalue())
    data[4:8] = data[40:44] = b"\xff" * 4
    assert Audio.read(io.BytesIO(data), longest=0.5).seconds == 0.5
    with pytest.raises(InputError, match=r"the sound is longer than 0\.4 s"):
        Audio.read(io.BytesIO(data), longest=0.4)


def test_many_samples_a_second_count_as_a_longer_sound(tmp_path: Path) -> None:
    """Of them, a body of the largest size would take much memory."""
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as sound:
        sound.setparams((8, 1, 48000, 0, "NONE", "none"))
        sound.writeframes(bytes(8 * 24000))
    assert Audio.read(path, longest=2.0).seconds == 0.5
    with pytest.raises(InputError, match="has 384000 samples a second, too many for its 0 s; convert it"):
        Audio.read(path, longest=1.9)


@pytest.mark.parametrize("name", ["a.flac", "a.m4a"])
def test_a_longer_sound_is_refused(name: str, reader: str, files: Path) -> None:
    with pytest.raises(InputError, match=r"' is longer than 0\.3 s"):
        Audio.read(files / name, longest=0.3)


def test_bad_files_are_refused_in_a_line(reader: str, files: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.mp3").write_bytes(b"")
    (tmp_path / "text.mp3").write_text("this is no sound", encoding="utf-8")
    (tmp_path / "cut.m4a").write_bytes((files / "a.m4a").read_bytes()[:3000])  # its index is at its end
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXTINF:10,\n{files / 'a.m4a'}\n", encoding="utf-8")
    (tmp_path / "list.mp3").write_text(f"ffconcat version 1.0\nfile '{files / 'a.m4a'}'\n", encoding="utf-8")
    with wave.open(str(tmp_path / "nothing.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", "none"))
    for path, words in (
        (tmp_path / "empty.mp3", "it is empty"),
        (tmp_path / "text.mp3", "is no sound file that can be read"),
        (tmp_path / "cut.m4a", "is no sound file that can be read"),
        (tmp_path / "list.m3u8", "is no sound file that can be read"),
        (tmp_path / "list.mp3", "is no sound file that can be read"),
        (files / "silent.mp4", "is no sound file that can be read"),
        (tmp_path / "nothing.wav", "has no samples"),
        (tmp_path, "cannot be read"),
        (tmp_path / "none.wav", "there is no file"),
        (Path("a\0.wav"), "cannot be read"),
    ):
        with pytest.raises(LoadError, match=words) as caught:
            Audio.read(path)
        assert repr(str(path)) in str(caught.value) and "\n" not in str(caught.value)
        if path.is_file():
            with pytest.raises(LoadError, match=words):
                Audio.read(opened(path))


def test_what_is_missing_is_said(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for name in ("av", "soundfile"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LoadError, match="install ffmpeg"):
        Audio.read(files / "a.mp3")


def test_a_cut_file_gives_what_is_there(reader: str, files: Path) -> None:
    data = (files / "a.webm").read_bytes()
    assert 0.05 < Audio.read(io.BytesIO(data[: len(data) // 2])).seconds < 0.45


def test_ffmpeg_has_a_time_limit(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    monkeypatch.setattr(sound_files, "SECONDS", 1e-4)
    with pytest.raises(LoadError, match="took longer than"):
        Audio.read(files / "a.m4a")
