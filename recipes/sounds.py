"""Words as sound: one chord a letter, in noise. Knows no model."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["HIGH", "LETTERS", "LOW", "RATE", "recording", "spelled"]

Samples = npt.NDArray[np.float32]

RATE = 16000
"""Samples a second; transformers' filters reach to 8 kHz."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LOW, HIGH = (440, 600, 780, 980, 1200, 1450), (1800, 2150, 2550, 3000, 3500)
"""Hz; a letter is one of each. They lie further apart than the bands of a small filter bank."""
SHORTEST, LONGEST = 0.06, 0.1
"""Seconds of a letter, or of the silence between words."""
RAMP = 0.012
"""Seconds in which a tone rises and falls: the same letter twice is two tones."""
LEAD = 0.2
"""Seconds of silence in front, at most."""


def spelled(text: str) -> list[str]:
    """The words of a text in the letters that can be played."""
    return re.findall(f"[{LETTERS}]+", re.sub(r"['’]", "", text.lower()))


def recording(text: str, seed: int | Sequence[int]) -> Samples:
    """Words as sound: (N,) samples in [-1, 1], `RATE` a second.

    Length, loudness, phase and noise differ from seed to seed; the same seed gives the same sound.
    """
    rng = np.random.default_rng(seed)
    loudness, noise = rng.uniform(0.1, 0.3), rng.uniform(0.002, 0.05)
    parts = [np.zeros(int(rng.uniform(0, LEAD) * RATE))]
    for letter in text:
        count = int(rng.uniform(SHORTEST, LONGEST) * RATE)
        if letter == " ":
            parts.append(np.zeros(count))
            continue
        high, low = divmod(LETTERS.index(letter), len(LOW))
        seconds = np.arange(count) / RATE
        chord = sum(
            np.sin(2 * np.pi * (hertz * seconds + rng.random())) * rng.uniform(0.7, 1.0)
            for hertz in (LOW[low], HIGH[high])
        )
        edge = np.minimum(seconds, seconds[::-1]) / RAMP
        parts.append(loudness * chord * np.sin(np.pi / 2 * np.clip(edge, 0, 1)) ** 2)
    sound = np.concatenate(parts)
    return np.clip(sound + noise * rng.standard_normal(len(sound)), -1, 1).astype(np.float32)
