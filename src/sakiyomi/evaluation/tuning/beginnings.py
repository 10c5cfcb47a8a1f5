"""Many beginnings of stories from a few sentences, written for this package."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path


def beginnings(count: int) -> list[str]:
    """Prompts of about 30 words, each another one. Neighbours share no sentence, and of the even and the odd ones both
    have all: the numbers of sentences are odd, and have no common divisor.

    Args:
        count: how many are wanted; there are 2717.
    """
    parts = list(tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).values())
    most = math.lcm(*map(len, parts))
    return [" ".join(part[i % len(part)] for part in parts) for i in range(min(count, most))]
