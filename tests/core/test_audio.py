"""Sounds: WAV files of every width, resampling, parts."""

from __future__ import annotations

import tracemalloc
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.signal import resample_poly

from sakiyomi import Audio, InputError
from sakiyomi.core import resampling
from sakiyomi.core.resampling import resample


def write(path: Path, frames: bytes, *, width: int = 2, channels: int = 1, rate: int = 16000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)
    return path


def sine(hertz: float, rate: int, seconds: float = 0.25) -> Any:
    return 0.7 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_is_read(width: int, tmp_path: Path) -> None:
    wanted = np.array([-1.0, -0.5, 0.0, 0.25, 0.75])
    whole = np.round(wanted * 2 ** (8 * width - 1)).astype(np.int64)
    if width == 1:
        frames = (whole + 128).astype(np.uint8).tobytes()
    else:
        frames = b"".join(int(value).to_bytes(width, "little", signed=True) for value in whole)
    sound = Audio.read(write(tmp_path / "a.wav", frames, width=width), language="en")
    np.testing.assert_allclose(sound.samples, wanted, atol=1e-7)
    assert sound.samples.dtype == np.float32
    assert (sound.sampling_rate, sound.language, sound.task) == (16000, "en", None)


def test_of_several_channels_the_mean_is_heard(tmp_path: Path) -> None:
    frames = np.array([[16384, 0], [0, -16384], [8192, 8192]], "<i2").tobytes()
    sound = Audio.read(write(tmp_path / "a.wav", frames, channels=2, rate=8000))
    np.testing.assert_allclose(sound.samples, [0.25, -0.25, 0.25])
    assert sound.seconds == pytest.approx(3 / 8000)
    np.testing.assert_allclose(Audio([[0.5, 0.0], [0.0, -0.5], [0.25, 0.25]], 8000).samples, sound.samples)


@pytest.mark.parametrize(
    ("old", "new"), [(8000, 16000), (44100, 16000), (48000, 16000), (22050, 16000), (11025, 16000)]
)
def test_resampling_keeps_a_tone_and_agrees_with_scipy(old: int, new: int) -> None:
    sound = Audio(sine(440, old), old).resampled(new)
    assert sound.sampling_rate == new
    assert sound.seconds == pytest.approx(0.25, abs=1e-4)
    inner = slice(200, 3800)
    np.testing.assert_allclose(sound.samples[inner], sine(440, new)[: len(sound.samples)][inner], atol=2e-3)
    divisor = np.gcd(old, new)
    scipys = resample_poly(sine(440, old), new // divisor, old // divisor)
    np.testing.assert_allclose(sound.samples[inner], scipys[inner], atol=5e-3)
    assert Audio(sine(440, new), new).resampled(new).samples.shape == (new // 4,)


def test_a_long_sound_takes_little_memory() -> None:
    """48 kHz is the rate of most videos; every new sample has 147 neighbours."""
    sound = Audio(np.zeros(48000 * 20, np.float32), 48000)
    tracemalloc.start()
    sound.resampled(16000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 * sound.samples.nbytes


@pytest.mark.parametrize("name", ["a.wav", "a.flac"])
def test_a_long_file_is_read_in_blocks(name: str, tmp_path: Path) -> None:
    """Of two minutes in stereo at 48 kHz, all samples take 46 MB, and the wanted ones 8 MB."""
    samples = np.random.default_rng(0).integers(-8000, 8000, (120 * 48000, 2), np.int16)
    if name == "a.wav":
        write(tmp_path / name, samples.tobytes(), channels=2, rate=48000)
    else:
        pytest.importorskip("soundfile").write(tmp_path / name, samples, 48000)
    tracemalloc.start()
    sound = Audio.read(tmp_path / name, sampling_rate=16000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < sound.samples.nbytes + 40e6
    assert sound.samples.tolist() == Audio.read(tmp_path / name).resampled(16000).samples.tolist()


@pytest.mark.parametrize(("old", "new"), [(44100, 16000), (8000, 16000), (16000, 16000)])
def test_the_cuts_between_blocks_are_not_heard(old: int, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(0).normal(0, 0.1, 30000).astype(np.float32)
    whole = np.concatenate([*resample([samples], old, new)])
    monkeypatch.setattr(resampling, "BLOCK", 2000)
    parts = [*resample(np.split(samples, [0, 1, 700, 9000, 9001, 29999]), old, new)]
    assert len(parts) > 5
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)


def test_what_is_above_the_new_range_is_taken_out() -> None:
    """Without a filter a tone of 15 kHz comes back as one of 1 kHz."""
    sound = Audio(sine(15000, 44100), 44100).resampled(16000)
    assert np.abs(sound.samples[200:3800]).max() < 0.01


def test_a_sound_is_cut_into_parts() -> None:
    sound = Audio(sine(440, 8000, 1.0), 8000, "en", "translate")
    parts = sound.split(0.4)
    assert [part.seconds for part in parts] == [0.4, 0.4, pytest.approx(0.2)]
    assert np.concatenate([part.samples for part in parts]).tolist() == sound.samples.tolist()
    assert (parts[2].language, parts[2].task) == ("en", "translate")
    with pytest.raises(InputError, match="seconds is 0"):
        sound.split(0)


@pytest.mark.parametrize(
    ("samples", "rate", "words"),
    [
        ([], 16000, "shape"),
        (np.zeros((2, 3, 4)), 16000, "shape"),
        (["a"], 16000, "no numbers"),
        ([np.nan], 16000, "NaN"),
        ([0.0], 0, "sampling_rate"),
        ([0.0], 16000.0, "sampling_rate"),
    ],
)
def test_samples_that_are_no_sound_are_refused(samples: Any, rate: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Audio(samples, rate)
    assert "samples" in repr(Audio([0.0, 0.5], 16000))
