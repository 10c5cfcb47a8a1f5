"""Base of policies that score pairs by the attention of the rows since the last boundary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from sakiyomi.cache.policies.base import Policy, View

ROWS = 128  # at once: a long chunk's attention is not held as a whole


def scaled_queries(layer: int, queries: Tensor, scaling: float) -> Tensor:
    """The rows' queries, scaled: (1, heads, rows, dim) to (rows, query heads x dim)."""
    return (queries[0] * scaling).transpose(0, 1).flatten(1)


class Looking(Policy):
    """Observes the queries of every row."""

    needs_queries: ClassVar[bool] = True

    def observe(self, layer: int, queries: Tensor, scaling: float) -> Tensor:
        """See ``scaled_queries``."""
        return scaled_queries(layer, queries, scaling)

    def total(self, view: View, rows: int | None = None) -> Tensor:
        """Attention that each pair gets from the last so many rows, all by default, and all query heads: (h, n)."""
        parts = [seen.sum((1, 2)) for seen in self.looks(view, rows)]
        return sum(parts[1:], parts[0])

    def looks(self, view: View, rows: int | None = None) -> Iterator[Tensor]:
        """Attention of the last so many rows, all by default, over all pairs: (h, g, some rows, n) float32 each."""
        assert view.observations is not None
        heads, n, dim = view.keys.shape
        queries = view.observations.view(view.new_count, -1, dim)
        group = queries.shape[1] // view.all_heads
        own = queries[:, view.heads.start * group : view.heads.stop * group]
        rows = min(view.new_count, rows or view.new_count)
        own = own.view(view.new_count, heads, group, dim).permute(1, 2, 0, 3)[:, :, view.new_count - rows :].float()
        keys = view.keys.float()[:, None].transpose(2, 3)
        for first in range(0, rows, ROWS):
            some = own[:, :, first : first + ROWS]
            scores = some @ keys
            later = torch.ones(some.shape[2], n, dtype=torch.bool, device=scores.device)
            later.triu_(n - rows + first + 1)
            yield scores.masked_fill_(later, -torch.inf).softmax(-1)
