"""Seconds of single passes of a model, every shape by turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.models import Numbers
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["IN_A_LAP", "ROOM", "pass_times", "random_target"]

Key = TypeVar("Key", bound=Hashable)
ROOM = 4200
"""Tokens that a slot has room for."""
IN_A_LAP = 3
"""Passes of a shape one after the other, as in use, before the next one has its turn."""


def random_target(model: Any, sizes: Sequence[int], *, compile: bool, **options: Any) -> ModelRunner:
    """A random model as our engine runs it, with graphs of these sizes if everything is to be compiled."""
    llm = LLM((model, Numbers()), draft="none", compile="auto" if compile else False, **options)
    if compile:
        llm.wait()  # for the kernels too
        llm.target.record(sizes)
    return llm.target


def pass_times(
    passes: Mapping[Key, tuple[ModelRunner, Sequence[SequenceRows]]], repeats: int, begin: Callable[[int], None]
) -> dict[Key, list[float]]:
    """Seconds of each pass in every lap; the first lap warms up and does not count.

    Args:
        passes: model and rows of each.
        repeats: laps that count.
        begin: is called before each lap, with its number.
    """
    found: dict[Key, list[float]] = {key: [] for key in passes}
    for lap in range(repeats + 1):
        begin(lap)
        for key, (model, rows) in passes.items():
            times = [_seconds(model, rows) for _ in range(IN_A_LAP)]
            if lap:
                found[key] += times
    return found


def _seconds(model: ModelRunner, rows: Sequence[SequenceRows]) -> float:
    began = time.perf_counter()
    model.score(rows)
    return time.perf_counter() - began
