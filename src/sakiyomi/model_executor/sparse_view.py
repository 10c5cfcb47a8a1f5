"""A session on an excerpt of a model's cache, with the same weights, kernels and recorded passes."""

from __future__ import annotations

from sakiyomi.cache.slots import SlotCache
from sakiyomi.model_executor.runner import ModelRunner


class Excerpt(ModelRunner):
    """A session in which a model sees only part of the text that it has read.

    ``SlotCache.excerpt`` fills the cache of this session; passes write behind the excerpt. Positions are those of the
    whole text.

    Args:
        whole: the model, with a cache that keeps all pairs.
        pairs: most pairs of a head: of the excerpt and behind it.
    """

    def __init__(self, whole: ModelRunner, pairs: int) -> None:
        self._whole = whole
        shapes = whole.cache.shapes
        limits = [[pairs] * shape.heads for shape in shapes]
        cache = SlotCache(shapes, dtype=whole.dtype, max_slots=whole.cache.max_slots, limits=limits)
        super().__init__(whole.weights, cache, evicts=True)
        cache.on_move = self.moved
        self.take_backend()

    def take_backend(self) -> None:
        """Use the whole model's kind of backend on this cache, and the passes that the whole model has recorded."""
        needs = self.weights.needs(exact=False, evicts=True)
        kind = type(self._whole.backend)
        self._adopt(kind(needs, self.cache), self._whole.recorder)
