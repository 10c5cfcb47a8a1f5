"""What a speech model says of a sound: segments with their times, and words where they were asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from sakiyomi.core.errors import InputError

Task = Literal["transcribe", "translate"]
Timestamps = Literal["none", "segment", "word"]
FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that Whisper tries in turn (Radford et al. 2022, arXiv 2212.04356, section 4.5)."""


@dataclass(frozen=True)
class Word:
    """A word with its times.

    Attributes:
        text: with the blank before it.
        start, end: seconds from the beginning of the sound.
        probability: mean over its tokens, 0 to 1.
    """

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Segment:
    """A part of a sound that the model marked with two timestamps; without timestamps, a window.

    Attributes:
        start, end: seconds from the beginning of the sound.
        text: with the blank before it.
        tokens: of the text, without timestamps.
        temperature: at which its window was decoded.
        average_logprob: mean natural logarithm of the tokens' probabilities, over its window.
        compression_ratio: bytes of the window's text over those that zlib makes of it; high where words repeat.
        no_speech_probability: of the window, 0 to 1.
        words: with their times; empty unless they were asked for.
        seek: frame (10 ms) of the sound at which its window begins.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    average_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_probability: float = 0.0
    words: tuple[Word, ...] = ()
    seek: int = 0


@dataclass(frozen=True)
class Transcript:
    """What was said in a sound.

    Attributes:
        segments: in their order.
        seconds: length of the sound.
        language: code of what is spoken ("en"), given or detected; None: the model knows one language.
        task: "transcribe" or "translate".
    """

    segments: tuple[Segment, ...]
    seconds: float
    language: str | None = None
    task: str = "transcribe"

    @property
    def text(self) -> str:
        """Of all segments."""
        return "".join(segment.text for segment in self.segments).strip()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"text": self.text}


@dataclass(frozen=True)
class TranscriptionParams:
    """How a sound is transcribed.

    Attributes:
        language: what is spoken, by name or code; None: detected from the first 30 seconds.
        task: "transcribe", or "translate" into English.
        timestamps: "segment", "word" (segments and words), or "none": the model writes no timestamps. Sounds longer
            than the model's window need timestamps and get them in any case.
        temperatures: tried in turn until a window's text passes the two thresholds below; 0: greedy.
        compression_ratio_threshold: a text that compresses better than this repeats itself; None: not looked at.
        logprob_threshold: a text with a lower mean log probability is tried again; None: not looked at.
        no_speech_threshold: a window is silent if the probability of no speech is higher, and the log probability of
            its text is below `logprob_threshold`; None: not looked at.
        condition_on_previous: the text before a window is its prompt.
        prompt: text that the model takes for what was said before; names and spellings.
        seed: of temperatures above 0.
    """

    language: str | None = None
    task: Task = "transcribe"
    timestamps: Timestamps = "segment"
    temperatures: tuple[float, ...] = FALLBACK
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous: bool = True
    prompt: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.task not in ("transcribe", "translate"):
            raise InputError(f"task is {self.task!r}; expected transcribe or translate")
        if self.timestamps not in ("none", "segment", "word"):
            raise InputError(f"timestamps is {self.timestamps!r}; expected none, segment or word")
        if not self.temperatures:
            raise InputError("temperatures is empty; expected one or more, for instance (0.0,)")
        for temperature in self.temperatures:
            if not 0 <= temperature <= 2:
                raise InputError(f"temperatures has {temperature!r}; expected 0 to 2")
