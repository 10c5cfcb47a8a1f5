"""What policies share that judge pairs by how much the rows that came since the last border look at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from sakiyomi.cache.policies.base import Policy, View

__all__ = ["Looking", "note_queries"]

ROWS = 128  # at once: a long chunk's attention is not held as a whole


def note_queries(layer: int, queries: Tensor, scaling: float) -> Tensor:
    """The rows' queries, scaled: (1, heads, rows, dim) to (rows, query heads x dim)."""
    return (queries[0] * scaling).transpose(0, 1).flatten(1)


class Looking(Policy):
    """Notes the queries of every row."""

    notes: ClassVar[bool] = True

    def note(self, layer: int, queries: Tensor, scaling: float) -> Tensor:
        """See ``note_queries``."""
        return note_queries(layer, queries, scaling)

    def looks(self, view: View, rows: int | None = None) -> Iterator[Tensor]:
        """Attention of the last so many rows, all by default, over all pairs: (h, g, some rows, n) float32 each."""
        assert view.notes is not None
        heads, n, dim = view.keys.shape
        queries = view.notes.view(view.fresh, -1, dim)
        group = queries.shape[1] // view.all_heads
        own = queries[:, view.heads.start * group : view.heads.stop * group]
        rows = min(view.fresh, rows or view.fresh)
        own = own.view(view.fresh, heads, group, dim).permute(1, 2, 0, 3)[:, :, view.fresh - rows :].float()
        keys = view.keys.float()[:, None].transpose(2, 3)
        for first in range(0, rows, ROWS):
            some = own[:, :, first : first + ROWS]
            scores = some @ keys
            later = torch.ones(some.shape[2], n, dtype=torch.bool, device=scores.device)
            later.triu_(n - rows + first + 1)
            yield scores.masked_fill_(later, -torch.inf).softmax(-1)
