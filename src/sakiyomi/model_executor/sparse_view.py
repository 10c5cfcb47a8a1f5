"""A packed model on an excerpt of its cache: the same weights, kernels and graphs, few of the keys and values."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from sakiyomi.cache.eviction import FullCache
from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.attention.torch import TorchBackend
from sakiyomi.model_executor.runner import DRAFT_SIZES, SIZES, ModelRunner

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.kernels.batch import BatchPlan

__all__ = ["Excerpt"]


class Excerpt(ModelRunner):
    """The logits that a model gives where it sees part of what it has read.

    Its own cache is filled by whoever makes excerpts (``SlotCache.excerpt``); passes write behind that, as always.
    Positions are those of the whole text. Nothing else is its own: a pass has the operators read this cache meanwhile.

    Args:
        whole: the model, with a cache of which nothing is dropped.
        pairs: of a head, of an excerpt with what is written behind it.
    """

    def __init__(self, whole: ModelRunner, pairs: int) -> None:
        self._whole = whole
        shapes = whole.cache.shapes
        self._excerpts = SlotCache(
            shapes,
            dtype=whole.dtype,
            max_slots=whole.cache.max_slots,
            limits=[[pairs] * shape.heads for shape in shapes],
        )
        self._share()

    def settle(self) -> None:
        """Follow the whole model to its kernels. Only while no request runs."""
        if self.state is not self._whole.state:
            seconds = self.forward_seconds
            self._share()
            self.forward_seconds = seconds

    def _share(self) -> None:
        own = {"_whole": self._whole, "_excerpts": self._excerpts}
        self.__dict__.update({**self._whole.__dict__, **own})
        self.cache, self.eviction = self._excerpts, FullCache(self._excerpts)
        self._layers, self._proven = len(self.cache.shapes), True
        self.forward_seconds, self.watchers = 0.0, []
        self._seconds, self._warm, self._buffers = {}, set(), {}
        self.exact, self.sizes, self.first_sizes = False, SIZES, DRAFT_SIZES
        self._captured = None

    def _run(
        self, plan: BatchPlan, size: int, *, keep: Tensor | None = None, graphs: Collection[int] | None = None
    ) -> Tensor:
        with self.lock, torch.no_grad():
            self._look_at(self.cache)
            try:
                return super()._run(plan, size, keep=keep, graphs=graphs)
            finally:
                self._look_at(self._whole.cache)

    def _look_at(self, cache: SlotCache) -> None:
        """Have the operators read and write this cache."""
        if isinstance(self.state, PackedWeights):
            if cache.room:
                self.state.attach(cache)
            self._excerpts.gather = None  # it would move rows of the cache that is looked at then
        elif isinstance(self.state, TorchBackend):
            self.state.cache = cache
