"""Attention backends: what computes attention of packed rows over the slots of a cache.

The seam is `registry.py`; a new backend is a file beside this one and a line in ``BACKENDS``.
"""

from __future__ import annotations

from sakiyomi.model_executor.attention.cpu import CpuBackend
from sakiyomi.model_executor.attention.cuda import CudaBackend
from sakiyomi.model_executor.attention.registry import AttentionBackend, BackendNeeds
from sakiyomi.model_executor.attention.torch import TorchBackend
from sakiyomi.model_executor.attention.triton import TritonBackend

__all__ = ["BACKENDS", "AttentionBackend", "BackendNeeds", "choose_backend"]

BACKENDS: list[type[AttentionBackend]] = [TritonBackend, CudaBackend, CpuBackend, TorchBackend]
"""In order of preference. The last one serves every model that calls our operator."""


def choose_backend(needs: BackendNeeds) -> type[AttentionBackend]:
    """The first backend that serves such a model."""
    return next(kind for kind in BACKENDS if kind.serves(needs))
