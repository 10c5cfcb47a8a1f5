"""What a training run has done so far: kept by the loop, shown by the reporter, drawn and written by others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Progress"]


@dataclass
class Progress:
    """What a run has done so far; kept in the checkpoint.

    Attributes:
        seconds: training time, pauses left out, summed over resumed parts.
        losses: (step, tokens, seconds, loss) of every step.
        held_out: one entry a measurement: step, tokens, seconds and the measures of each file.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, int, float, float]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
