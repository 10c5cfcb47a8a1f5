"""What fits in how much memory, from sizes alone: nothing is loaded."""

from __future__ import annotations

from typing import Any

from sakiyomi.cache.policies import read_cache
from sakiyomi.core.checkpoint import Checkpoint
from sakiyomi.evaluation.bench.locret.config import LocretConfig
from sakiyomi.evaluation.bench.long.config import budget_pairs
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.model_executor.loading.model import parse_dtype

__all__ = ["fitting", "pair_bytes"]

DEVICES = (8, 12, 16, 24, 40, 80)
"""GB of memory of common devices."""
CHUNK = 1024


def pair_bytes(sizes: Any, itemsize: float) -> float:
    """Bytes of one token's keys and values in all layers.

    Args:
        sizes: a configuration of transformers.
        itemsize: bytes of a number.
    """
    heads = int(sizes.num_attention_heads)
    dim = int(getattr(sizes, "head_dim", None) or sizes.hidden_size // heads)
    return 2 * int(sizes.num_hidden_layers) * int(getattr(sizes, "num_key_value_heads", None) or heads) * dim * itemsize


def fitting(config: LocretConfig, sizes: Any, checkpoint: Checkpoint) -> Row:
    """Weights, keys and values of each system at each length, and the smallest device that holds both.

    Rows of a chunk, and what the libraries take, come on top.
    """
    dtype = parse_dtype(config.dtype)
    itemsize = dtype.itemsize if dtype is not None else {"float32": 4}.get(str(checkpoint.dtype), 2)
    weights = checkpoint.bytes_as(itemsize)
    lines = []
    for length in config.long().numbers("lengths", least=8):
        for name, spec in config.systems().items():
            policy, packing, _, _ = read_cache(spec)
            held = length
            if policy is not None:
                held = min(length, budget_pairs(config.budget, length) + (config.chunk_size or CHUNK))
            size = itemsize if packing is None else packing.bits / 8 + 4 / 32  # two halves a group of 32
            kept = held * pair_bytes(sizes, size)
            far = length * pair_bytes(sizes, itemsize) if policy is not None and policy.recalls else None
            whole = (weights + kept) / 1e9
            device = next((f"{room} GB" for room in DEVICES if whole <= room), f"over {DEVICES[-1]} GB")
            lines.append(
                {
                    "name": name,
                    "length": length,
                    "kv GB": kept / 1e9,
                    "elsewhere GB": None if far is None else far / 1e9,
                    "with weights GB": whole,
                    "fits in": device,
                }
            )
    title = "on paper: keys and values, with the weights, and the smallest device that holds both"
    return Row("fits", title, lines, {"weights_bytes": weights, "dtype_bytes": itemsize})
