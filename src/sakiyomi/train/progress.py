"""What a training run has done so far: kept by the loop, shown by the reporter, drawn and written by others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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


# ---------------------------------------------------------------- schedule


# A process that is stopped for minutes (SIGSTOP, a sleeping laptop) is charged at most this much for its step.
LONGEST_STEP_SECONDS = 60.0


@dataclass
class Schedule:
    """Warm-up, stable phase, linear decay to 0 between `decay_from` and `end` (in clock units: seconds or tokens).

    Warm-up is over after so many steps, and not before `warm_from` on the clock.
    """

    warmup_steps: int
    decay_from: float
    end: float
    warm_from: float = 0.0

    def scale(self, step: int, clock: float) -> float:
        """Factor of the peak learning rate, in [0, 1]."""
        warmup = min(1.0, (step + 1) / max(self.warmup_steps, 1), clock / self.warm_from if self.warm_from else 1.0)
        if clock < self.decay_from:
            return warmup
        return warmup * max(0.0, (self.end - clock) / max(self.end - self.decay_from, 1e-9))

    def decaying(self, clock: float) -> bool:
        """Whether the decay has begun."""
        return clock >= self.decay_from

    def finish(self, clock: float, length: float) -> None:
        """Begin the decay now, to end in `length` units; a decay under way is only ever shortened."""
        if self.decaying(clock):
            length = min(length, self.end - clock)
            # The slope changes, the learning rate of this moment does not.
            share = (self.end - clock) / max(self.end - self.decay_from, 1e-9)
            self.end = clock + length
            self.decay_from = self.end - length / max(share, 1e-9)
        else:
            self.decay_from, self.end = clock, clock + length
