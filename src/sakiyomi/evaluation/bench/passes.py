"""Time of one pass of the target by its rows and the tokens in the cache, beside the time that reading them takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.engine.machine import bandwidth
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.models import MEDIUM, described, random_llama
from sakiyomi.evaluation.bench.pass_times import IN_A_LAP, ROOM, pass_times, random_target
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["passes"]

WEIGHTS = {"bf16": None, "int8": "int8", "int4": "int4"}
CACHED = (128, 1024, 4096)
ROWS = (1, 4, 8, 16)


def passes(row: PairRow) -> Row:
    """Milliseconds of passes over 1 to 16 rows of one request, of a random model with quantized weights and without.

    All weights, lengths and row counts take turns, and so does the measurement of what the memory gives.
    """
    config = row.config
    row.note("making the random model")
    model = random_llama(*MEDIUM, torch.bfloat16, positions=ROOM, device=config.device)
    targets: dict[str, ModelRunner] = {}
    notes = []
    for name, quantize in WEIGHTS.items():
        row.note(f"{name}, packing and compiling")
        try:
            targets[name] = random_target(model, ROWS, compile=config.compile, quantize=quantize)
        except UnsupportedError as error:
            notes.append(f"{name}: {error}")
    slots = {name: target.cache.take() for name, target in targets.items()}
    for name, target in targets.items():
        target.cache.reserve(slots[name], ROOM)
    shapes = {
        (name, cached, rows): (target, [SequenceRows(slots[name], cached, [5] * rows)])
        for name, target in targets.items()
        for cached in CACHED
        for rows in ROWS
    }
    speeds: list[float] = []

    def begin(lap: int) -> None:
        row.note(f"lap {lap} of {config.repeats}")
        speeds.append(bandwidth(device=str(model.device)))

    seconds = pass_times(shapes, config.repeats, begin)
    speed = max(speeds)
    lines = [
        _line(name, slots[name], cached, {rows: seconds[name, cached, rows] for rows in ROWS}, target, speed)
        for name, target in targets.items()
        for cached in CACHED
    ]
    conditions = {
        "model": described(model),
        "graphs": next(iter(targets.values())).mode,
        "read_a_second_bytes": speed,
        "laps": config.repeats,
        "passes_a_lap": IN_A_LAP,
    }
    title = (
        "milliseconds of a pass over so many rows, median and low; read_ms: what its reading takes at full bandwidth"
    )
    return Row("passes", title, lines, conditions, notes)


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
