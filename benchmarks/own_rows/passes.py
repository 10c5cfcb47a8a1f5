"""Seconds of single passes: by rows and cached tokens beside what their reading takes, and of trees beside chains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from random_models import MEDIUM, Numbers, described, random_llama
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.machine import bandwidth
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.theory import best_tree

__all__ = ["passes", "scoring"]

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
        row.note(f"{name}, packing and recording passes")
        try:
            targets[name] = random_target(model, compile=config.compile, quantize=quantize)
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


PREFIXES = (32, 512, 4096)
NODES = (8, 16)
RANKS = (0.7, 0.15, 0.08, 0.04)  # of the tree's shape
DEPTH = 5


def scoring(row: PairRow) -> Row:
    """One pass over a tree of 8 or 16 tokens, over a chain, and over the tree's paths as requests of their own.

    The paths from the root to each leaf are what a batch would have to score: each with its own copy of the prefix.
    """
    config = row.config
    row.note("making the random model")
    model = random_llama(*MEDIUM, torch.bfloat16, positions=ROOM, device=config.device)
    shapes = {count: best_tree(RANKS, count, DEPTH) for count in NODES}
    most = max(len(_leaves(shape)) for shape in shapes.values())
    target = random_target(model, compile=config.compile, max_batch=most)
    slots = [target.cache.take() for _ in range(most)]
    target.cache.reserve(slots[-1], ROOM)
    passes: dict[tuple[int, int, str], tuple[ModelRunner, Sequence[SequenceRows]]] = {}
    for prefix in PREFIXES:
        for count, shape in shapes.items():
            parents = tuple(shape.index(path[:-1]) if len(path) > 1 else -1 for path in shape)
            leaves = zip(slots, _leaves(shape), strict=False)
            ways = {
                "chain": [SequenceRows(slots[0], prefix, [5] * count)],
                "tree": [SequenceRows(slots[0], prefix, [5] * count, parents)],
                "batch": [SequenceRows(slot, prefix, [5] * len(leaf)) for slot, leaf in leaves],
            }
            passes |= {(prefix, count, way): (target, rows) for way, rows in ways.items()}
    seconds = pass_times(passes, config.repeats, lambda lap: row.note(f"lap {lap} of {config.repeats}"))
    pair_bytes = target.cache.pair_bytes
    lines = []
    for prefix in PREFIXES:
        for count, shape in shapes.items():
            chain, tree, batch = (statistics.median(seconds[prefix, count, way]) for way in ("chain", "tree", "batch"))
            rows = sum(len(leaf) for leaf in _leaves(shape))
            lines.append({
                "prefix": prefix,
                "nodes": count,
                "leaves": len(_leaves(shape)),
                "chain_ms": 1000 * chain,
                "tree_ms": 1000 * tree,
                "batch_ms": 1000 * batch,
                "tree/chain": tree / chain,
                "batch/tree": batch / tree,
                "tree_kv_bytes": (prefix + count) * pair_bytes,
                "batch_kv_bytes": (len(_leaves(shape)) * prefix + rows) * pair_bytes,
            })  # fmt: skip
    conditions = {
        "model": described(model),
        "graphs": target.mode if all(target.recorded(rows) for rows in NODES) else "eager",
        "depth": DEPTH,
        "laps": config.repeats,
        "passes_a_lap": IN_A_LAP,
    }
    return Row("scoring", "milliseconds of one pass, and the keys and values it holds", lines, conditions)


def _leaves(shape: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Nodes that nothing hangs from."""
    inner = {path[:-1] for path in shape}
    return [path for path in shape if path not in inner]


Key = TypeVar("Key", bound=Hashable)
ROOM = 4200
"""Tokens that a slot has room for."""
IN_A_LAP = 3
"""Passes of a shape one after the other, as in use, before the next one has its turn."""


def random_target(model: Any, *, compile: bool, **options: Any) -> ModelRunner:
    """A random model as our engine runs it, with recorded passes unless everything is to be eager."""
    llm = LLM((model, Numbers()), draft="none", compile="auto" if compile else False, **options)
    if compile:
        llm.wait()  # for the kernels too
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
