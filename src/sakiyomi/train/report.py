"""What a run says while it works: a bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time

from rich import progress as bars
from rich.console import Console

from sakiyomi.train.progress import Progress

# The loss shown is a running mean: single steps differ by the rows they drew.
SMOOTHING = 0.95


class Reporter:
    """Context manager of one run's progress output.

    Args:
        log_seconds: seconds between lines where stderr is not a terminal.
        silent: nothing is said; another process speaks.
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
