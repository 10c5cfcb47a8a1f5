"""What a pass over a tree costs, compared with a chain of as many tokens and with a batch of the tree's paths."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.models import MEDIUM, described, random_llama
from sakiyomi.evaluation.bench.pass_times import IN_A_LAP, ROOM, pass_times, random_target
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.theory import best_tree

__all__ = ["scoring"]

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
    target = random_target(model, (8, 16, 32, 64), compile=config.compile, max_batch=most)
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
