"""Sounds for speech models: samples of one channel; WAV files are read by the standard library, others by soundfile."""

from __future__ import annotations

import math
import os
import wave
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from sakiyomi.core.errors import InputError, LoadError

Samples = NDArray[np.float32]
_PAUSE = 0.2  # seconds
CONVERT = "convert it, for instance: ffmpeg -i FILE -ac 1 -c:a pcm_s16le sound.wav"
_WIDTH = 24  # zero crossings of the resampling filter on each side


@dataclass(frozen=True, eq=False)
class Audio:
    """A sound.

    Args:
        samples: (n,) float32 of one channel, -1 to 1; other arrays and lists of numbers are converted, and of several
            channels, (n, channels), the mean is taken.
        sampling_rate: samples a second.
        language: what is spoken, by name or code ("en"); None: the model detects it.
        task: "transcribe" or "translate" (into English); None: the model's own choice.

    Raises:
        InputError: there are no samples, or they are no sound.
    """

    samples: Samples
    sampling_rate: int
    language: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        rate = self.sampling_rate
        if not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
            raise InputError(f"sampling_rate is {rate!r}; expected a whole number of samples a second")
        try:
            samples = np.asarray(self.samples, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InputError(f"samples are no numbers ({error}); expected an array of floats") from None
        if samples.ndim == 2 and 0 < samples.shape[1] <= samples.shape[0]:
            samples = samples.mean(1)
        if samples.ndim != 1 or not samples.size:
            raise InputError(f"samples have the shape {samples.shape}; expected (n,), or (n, channels), n at least 1")
        if not np.isfinite(samples).all():
            raise InputError("samples have values that are no numbers (NaN or infinite); expected -1 to 1")
        object.__setattr__(self, "samples", samples)

    def __repr__(self) -> str:
        told = "".join(f", {name}={value!r}" for name in ("language", "task") if (value := getattr(self, name)))
        return f"Audio({len(self.samples)} samples, sampling_rate={self.sampling_rate}{told})"

    @classmethod
    def read(
        cls, path: str | os.PathLike[str] | BinaryIO, *, language: str | None = None, task: str | None = None
    ) -> Audio:
        """The sound in a WAV file of whole numbers (8 to 32 bits), or in another file of soundfile's (FLAC, Ogg).

        Of several channels the mean.

        Args:
            path: of the file, or an open one.
            language, task: see ``Audio``.

        Raises:
            LoadError: there is no such file, it is empty or damaged, of another kind, or soundfile is not installed.
        """
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else "the sound"
        try:
            with wave.open(name if isinstance(path, str | os.PathLike) else path, "rb") as file:
                channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
                data = file.readframes(file.getnframes())
        except FileNotFoundError:
            raise LoadError(f"there is no file {name!r}; check the path") from None
        except OSError as error:
            raise LoadError(f"{name!r} cannot be read ({error.strerror}); check the path") from None
        except (wave.Error, EOFError) as error:
            samples, rate = _other_file(path, name, str(error) or "it ends before it begins")
        else:
            if not 1 <= width <= 4:
                raise LoadError(f"{name!r} has samples of {8 * width} bits; expected 8, 16, 24 or 32; {CONVERT}")
            if rate < 1:
                raise LoadError(f"{name!r} has {rate} samples a second; the file is damaged")
            samples = _decoded(data, width, channels)
        if not len(samples):
            raise LoadError(f"{name!r} has no samples; give a file with a sound")
        return cls(samples.mean(1), rate, language, task)

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return len(self.samples) / self.sampling_rate

    def resampled(self, rate: int) -> Audio:
        """The sound at another sampling rate, by band-limited interpolation with a windowed sinc."""
        if rate == self.sampling_rate:
            return self
        return replace(self, samples=_resample(self.samples, self.sampling_rate, rate), sampling_rate=rate)

    def split(self, seconds: float, *, at_silences: bool = False) -> list[Audio]:
        """Parts of `seconds` each, the last one shorter.

        Args:
            seconds: of a part, at most.
            at_silences: cut in the middle of the quietest fifth of a second in the last half of each part: in pauses
                between words.
        """
        count = int(seconds * self.sampling_rate)
        if count < 1:
            raise InputError(f"seconds is {seconds!r}; expected a part of at least one sample")
        cuts = [0]
        while len(self.samples) - cuts[-1] > count:
            part = self.samples[cuts[-1] : cuts[-1] + count]
            cuts.append(cuts[-1] + (_quietest(part, self.sampling_rate) if at_silences else count))
        ends = [*cuts[1:], len(self.samples)]
        return [replace(self, samples=self.samples[begin:end]) for begin, end in zip(cuts, ends, strict=True)]


def _quietest(samples: Samples, rate: int) -> int:
    """The middle of the quietest window in the last half of a sound; of equal ones the last."""
    half = samples[len(samples) // 2 :]
    window = max(1, min(len(half), int(_PAUSE * rate)))
    sums = np.concatenate([[0.0], np.cumsum(half.astype(np.float64) ** 2)])
    loudness = sums[window:] - sums[:-window]
    return max(1, len(samples) - window // 2 - int(loudness[::-1].argmin()))


def _other_file(path: str | os.PathLike[str] | BinaryIO, name: str, reason: str) -> tuple[Samples, int]:
    """Samples (n, channels) and rate of a file that is no WAV file of whole numbers."""
    try:
        import soundfile
    except ImportError:
        raise LoadError(
            f"{name!r} is no WAV file of whole numbers ({reason}); pip install 'sakiyomi[tasks]' for other kinds, or "
            f"{CONVERT}"
        ) from None
    try:
        if not isinstance(path, str | os.PathLike):
            path.seek(0)
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise LoadError(f"{name!r} is no sound file that can be read ({error}); {CONVERT}") from None
    return samples, int(rate)


def _decoded(data: bytes, width: int, channels: int) -> Samples:
    """(n, channels) numbers of -1 to 1 from the whole numbers of a WAV file, little endian, of `width` bytes."""
    count = len(data) // (width * channels) * channels
    wide = np.zeros((count, 4), np.uint8)
    wide[:, 4 - width :] = np.frombuffer(data, np.uint8)[: count * width].reshape(-1, width)
    if width == 1:  # alone without a sign
        wide[:, 3] ^= 0x80
    return (wide.view("<i4") / 2**31).astype(np.float32).reshape(-1, channels)


def _resample(samples: Samples, old: int, new: int) -> Samples:
    """A sum over the neighbours of each new sample, weighted by a Hann-windowed sinc below the lower Nyquist rate.

    The weights repeat: of the places between old samples there are only new / gcd(old, new).
    """
    divisor = math.gcd(old, new)
    up, down = new // divisor, old // divisor
    cutoff = min(1.0, up / down) * 0.97
    half = math.ceil(_WIDTH / cutoff)
    count = -(-len(samples) * up // down)
    padded = np.pad(samples, half)
    found = np.zeros(count, np.float32)
    offsets = np.arange(-half, half + 1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    for phase in range(min(up, count)):
        places = np.arange(phase, count, up) * down
        distance = offsets - (places[0] % up) / up
        window = 0.5 + 0.5 * np.cos(np.pi * np.clip(distance / (half + 1), -1, 1))
        weights = np.sinc(cutoff * distance) * window
        found[phase::up] = windows[np.minimum(places // up, len(samples) - 1)] @ (weights / weights.sum())
    return found
