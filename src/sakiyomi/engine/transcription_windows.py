"""Windows of a sound: what their tokens say about segments, and where the next window begins."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

STEP = 0.02
"""Seconds of a timestamp, and of a place of the encoder."""
FRAMES = 2
"""Frames of the features in a step."""


@dataclass(frozen=True)
class Part:
    """A part of a window between two timestamps.

    Attributes:
        start, end: steps from the beginning of the window.
        tokens: with timestamps.
        place: of the first token among those of the window.
    """

    start: int
    end: int
    tokens: tuple[int, ...]
    place: int


def cut(tokens: Sequence[int], zero: int, frames: int) -> tuple[list[Part], int]:
    """Cut the text of a window where timestamps meet.

    What lies behind the last pair is left to the next window, unless the text ends with a single timestamp: then
    nothing is said behind it.

    Args:
        tokens: of the window, without the end token.
        zero: token of 0.00 seconds.
        frames: of the window's features.

    Returns:
        Its parts, and the frames to the next window.
    """
    times = [token >= zero for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if times[i - 1] and times[i]]
    if not cuts:
        last = next((token - zero for token in reversed(tokens) if token >= zero), 0)
        return [Part(0, last or frames // FRAMES, tuple(tokens), 0)], frames
    closed = times[-2:] == [False, True]
    ends = [*cuts, len(tokens)] if closed else cuts
    parts = []
    for begin, end in zip([0, *ends], ends, strict=False):
        own = tuple(tokens[begin:end])
        parts.append(Part(own[0] - zero, own[-1] - zero, own, begin))
    return parts, frames if closed else parts[-1].end * FRAMES


def compression_ratio(text: str) -> float:
    """Bytes of a text over those that zlib makes of it."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
