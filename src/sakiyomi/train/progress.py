"""State of a training run: its progress, its learning rate, and what it prints and logs of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import progress as bars
from rich.console import Console
from torch import Tensor

from sakiyomi.train.checkpoint import whole_lines, writing


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


# ---------------------------------------------------------------- learning rate


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


# ---------------------------------------------------------------- what is shown


# The loss shown is a running mean: single steps differ by the rows they drew.
SMOOTHING = 0.95


class Reporter:
    """Context manager of one run's progress output.

    Args:
        log_seconds: seconds between lines where stderr is not a terminal.
        silent: prints nothing, because another process reports.
    """

    def __init__(self, log_seconds: float, *, silent: bool = False) -> None:
        self._console = Console(file=sys.stderr, soft_wrap=True, highlight=False, quiet=silent)
        self._log_seconds = log_seconds
        self._last, self._last_tokens, self._last_seconds = time.monotonic(), 0, 0.0
        self._loss: float | None = None
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
            console=self._console,
            disable=silent or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=1.0)

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Without the bar on the screen."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def step(self, progress: Progress, share: float, scale: float) -> None:
        """Report the step just done; `share` of the budget is spent, `scale` is the factor of the learning rate."""
        loss = progress.losses[-1][-1]
        self._loss = loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * loss
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last < self._log_seconds:
            return
        rate = (progress.tokens - self._last_tokens) / max(progress.seconds - self._last_seconds, 1e-9)
        text = (
            f"step {progress.step}  tokens {progress.tokens}  {progress.seconds / 60:.1f} min  loss {loss:.4f} "
            f"(mean {self._loss:.4f})  lr x{scale:.3f}  {rate:.0f} tokens/s"
        )
        if self._console.is_terminal:
            self._bar.update(self._task, completed=share, description=text)
        else:
            self.note(f"{100 * share:5.1f}%  {text}")
        self._last, self._last_tokens, self._last_seconds = now, progress.tokens, progress.seconds

    def measures(self, step: int, measures: dict[str, dict[str, float]]) -> None:
        """Report held-out measures."""
        for name, values in measures.items():
            shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items() if key != "tokens")
            self.note(f"step {step}  held-out {name}: {shown}")

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, markup=False)


# ---------------------------------------------------------------- what each head learnt, step by step


class HeadLog:
    """The means of each head at every step, a line each in a file that a resumed run continues.

    A line has ``step``, ``loss`` (K) in nats and, where it is known, ``top`` (K, 5): the share of places whose token
    was among a head's first 1, 2, ... 5 guesses.

    Args:
        path: of the file.
        resume: continue it.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self._fresh: list[list[float]] = []
        with writing(path):
            if resume:
                whole_lines(path)  # a last line that was cut off is removed
            self._file = path.open("a" if resume else "w", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # of a full disk, which was said when the line was written
            self._file.close()

    def add(self, step: int, means: Tensor) -> None:
        """The next step's: (K) losses, or (K, 1 + 5) with the shares after them."""
        rounded = [[round(value, 5) for value in each] for each in means.reshape(len(means), -1).tolist()]
        self._fresh.append([loss for loss, *_ in rounded])
        line: dict[str, Any] = {"step": step, "loss": self._fresh[-1]}
        if means.dim() > 1:
            line["top"] = [tops for _, *tops in rounded]
        with writing(self._path):
            self._file.write(json.dumps(line) + "\n")

    def recent(self) -> list[float]:
        """Mean losses over the steps since this was asked last."""
        found = np.mean(self._fresh, axis=0).tolist() if self._fresh else []
        self._fresh = []
        return list(found)

    def curve(self, key: str = "loss", most: int = 200) -> list[tuple[int, list[Any]]]:
        """Means over so many steps that a curve has few points; ``key``: loss or top."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        # Steps after the checkpoint that a run was resumed from were made again: the later line counts.
        steps = {entry["step"]: entry[key] for entry in map(json.loads, lines) if key in entry}
        means = sorted(steps.items())
        size = max(1, -(-len(means) // most))
        pieces = [means[at : at + size] for at in range(0, len(means), size)]
        return [(piece[-1][0] + 1, np.mean([each for _, each in piece], axis=0).tolist()) for piece in pieces]
