"""Attention backends on a cache without a model."""

from __future__ import annotations

import torch

from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.attention.cpu import CpuBackend
from sakiyomi.model_executor.attention.registry import BackendNeeds
from sakiyomi.model_executor.attention.torch import TorchBackend


def backend_on(cache: SlotCache, *, native: bool = False, by_row: bool = False) -> CpuBackend | TorchBackend:
    """A backend that follows the cache when its tensors move: the compiled kernels, or plain torch."""
    needs = BackendNeeds(torch.device("cpu"), packed=PackedWeights.create() if native else None, exact=by_row)
    backend = CpuBackend(needs, cache) if native else TorchBackend(needs, cache)
    cache.on_move = backend.attach
    return backend


def begin(weights: PackedWeights, rows: int, filler: int = 0) -> None:
    """A pass of one request comes, for layers that are called without their model; `filler` rows only fill it up."""
    weights.begin(BatchPlan([SequenceRows(0, 0, [0] * rows)]), rows + filler)
