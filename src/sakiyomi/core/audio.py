"""Sounds for speech models: samples of one channel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.core.resampling import Samples, resample
from sakiyomi.core.sound_files import SoundFile, read_samples

_PAUSE = 0.2  # seconds


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
        cls,
        path: SoundFile,
        *,
        sampling_rate: int | None = None,
        language: str | None = None,
        task: str | None = None,
        longest: float | None = None,
    ) -> Audio:
        """The sound in a file, or the sound track of a video; of several channels the mean.

        WAV files of whole numbers (8 to 32 bits) need nothing else. FLAC, Ogg and MP3 need soundfile; all other kinds
        the command ffmpeg, or PyAV.

        Args:
            path: of the file, or an open file that can be read anew from its beginning.
            sampling_rate: samples a second that are wanted; a long sound of a higher rate then takes less memory. None:
                those of the file.
            language, task: see ``Audio``.
            longest: most seconds; None: any length.

        Raises:
            LoadError: there is no such file, it is empty or damaged, or its kind cannot be read here.
            InputError: it is longer than ``longest``.
        """
        samples, rate = read_samples(path, longest, sampling_rate)
        return cls(samples, rate, language, task)

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return len(self.samples) / self.sampling_rate

    def resampled(self, rate: int) -> Audio:
        """The sound at another sampling rate, by band-limited interpolation with a windowed sinc."""
        if rate == self.sampling_rate:
            return self
        blocks = resample([self.samples], self.sampling_rate, rate)
        return replace(self, samples=np.concatenate([*blocks]), sampling_rate=rate)

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
