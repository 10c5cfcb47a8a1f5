"""What one pass of the target costs, by its rows and the tokens in the cache, beside what its reading alone takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.engine.machine import bandwidth
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.models import MEDIUM, Numbers, described, random_llama
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.kernels.batch import SequenceRows

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["passes"]

WEIGHTS = {"bf16": None, "int8": "int8", "int4": "int4"}
CACHED = (128, 1024, 4096)
ROWS = (1, 4, 8, 16)
ROOM = 4200
IN_A_LAP = 3
"""Passes of a shape one after the other, as in use, before the next one has its turn."""


def passes(config: BenchConfig, note: Note) -> Row:
    """Milliseconds of passes over 1 to 16 rows of one request, of a random model with rounded weights and without.

    All weights, lengths and row counts take turns, and so does the measurement of what the memory gives.
    """
    note("passes: making the random model")
    model = random_llama(*MEDIUM, torch.bfloat16, positions=ROOM, device=config.device)
    targets: dict[str, ModelRunner] = {}
    notes = []
    for name, quantize in WEIGHTS.items():
        note(f"passes: {name}, packing and compiling")
        try:
            targets[name] = _target(model, quantize, config.compile)
        except UnsupportedError as error:
            notes.append(f"{name}: {error}")
    slots = {name: target.cache.take() for name, target in targets.items()}
    for name, target in targets.items():
        target.cache.reserve(slots[name], ROOM)
    seconds: dict[tuple[str, int, int], list[float]] = {
        (name, cached, rows): [] for name in targets for cached in CACHED for rows in ROWS
    }
    speed = 0.0
    for lap in range(config.repeats + 1):
        note(f"passes: lap {lap} of {config.repeats}")
        speed = max(speed, bandwidth(device=str(model.device)))
        for (name, cached, rows), found in seconds.items():
            segment = SequenceRows(slots[name], cached, [5] * rows)
            times = [_seconds(targets[name], segment) for _ in range(IN_A_LAP)]
            if lap:
                found += times
    lines = [
        _line(name, slots[name], cached, {rows: seconds[name, cached, rows] for rows in ROWS}, target, speed)
        for name, target in targets.items()
        for cached in CACHED
    ]
    conditions = {
        "model": described(model),
        "graphs": "compiled" if all(t.recorded(rows) for t in targets.values() for rows in ROWS) else "eager",
        "read_a_second_bytes": speed,
        "laps": config.repeats,
        "passes_a_lap": IN_A_LAP,
    }
    title = (
        "milliseconds of a pass over so many rows, median and low; read_ms: what its reading takes at full bandwidth"
    )
    return Row("passes", title, lines, conditions, notes)


def _target(model: Any, quantize: str | None, compile: bool) -> ModelRunner:
    from sakiyomi.engine.llm import LLM

    llm = LLM((model, Numbers()), draft="none", quantize=quantize, compile="auto" if compile else False)
    if compile:
        llm.wait()  # for the kernels too
        llm.target.record(ROWS)
    return llm.target


def _seconds(target: ModelRunner, segment: SequenceRows) -> float:
    began = time.perf_counter()
    target.score([segment])
    return time.perf_counter() - began


def _line(
    name: str, slot: int, cached: int, seconds: dict[int, Sequence[float]], target: ModelRunner, speed: float
) -> dict[str, Any]:
    """Medians and lowest by row count; bytes that a pass reads, and what they take at so many bytes a second."""
    line: dict[str, Any] = {"name": name, "cached": cached}
    for rows, found in seconds.items():
        line |= {f"ms_{rows}": 1000 * statistics.median(found), f"low_ms_{rows}": 1000 * min(found)}
    weights, pairs = target.weights.bytes or 0, target.cache.held_bytes(slot, cached)
    return line | {
        "ratio_8_to_1": line["ms_8"] / line["ms_1"],
        "weight_bytes": weights,
        "kv_bytes": pairs,
        "read_ms": 1000 * (weights + pairs) / speed,
    }
