"""Attention of a prompt's rows over some of the columns, in plain torch.

A ``Sparse`` (``policies/minference.py``) chooses the columns. It can be combined with any eviction policy. It chooses
from one chunk of one prompt and the keys before it, so its choice depends on the request alone. Passes that generate
text attend to everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.core.errors import InputError


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """A chunk of one prompt in one layer.

    Attributes:
        queries: (H, rows, dim) after their rotation.
        keys: (H_kv, n, dim) that the cache holds, those of the chunk itself last.
        scaling, softcap, window: of the layer; 0 for no cap and no window.
    """

    queries: Tensor
    keys: Tensor
    scaling: float
    softcap: float
    window: int

    @property
    def first(self) -> int:
        """Column of the first row's own key."""
        return self.keys.shape[1] - self.queries.shape[1]

    def attention(self, count: int) -> Tensor:
        """What the last so many rows look at, if they see everything: (H, count, n) float32, each row sums to 1."""
        heads, rows, dim = self.queries.shape
        shared, n, _ = self.keys.shape
        queries = (self.queries[:, rows - count :] * self.scaling).reshape(shared, -1, dim)
        scores = (queries @ self.keys.transpose(1, 2)).float().view(heads, count, n)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        later = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., n - count :].masked_fill_(later, -torch.inf)
        if self.window:
            column = torch.arange(n, device=scores.device)
            scores.masked_fill_(column <= column[n - count :, None] - self.window, -torch.inf)
        return scores.softmax(-1)


@dataclass(kw_only=True)
class Sparse:
    """Base of all.

    Attributes:
        block: rows, side by side, that look at the same columns.
    """

    name: ClassVar[str] = ""

    block: int = 64

    def __post_init__(self) -> None:
        if self.block < 1:
            raise InputError(f"block={self.block} of {self.name}; expected at least one row")

    def seen(self, chunk: Chunk) -> Iterator[Tensor]:
        """For every block of rows, the first one beginning with the chunk's first row, what each head looks at.

        Whatever this says, rows see their block's own columns as far as they are not later ones, and nothing beyond a
        sliding window.

        Returns:
            (H, n') bool each, n' columns up to the block's last row.
        """
        raise NotImplementedError


def attend_some(sparse: Sparse, chunk: Chunk, values: Tensor) -> Tensor:
    """Rows of a chunk over the columns that a policy says, (H, rows, dim) to (rows, H, D_v).

    The columns of a block of rows are gathered, of each head its own.

    Args:
        sparse: says which.
        chunk: queries and keys.
        values: (H_kv, n, D_v).
    """
    heads, rows, _ = chunk.queries.shape
    group = heads // len(values)
    out = values.new_empty(rows, heads, values.shape[2])
    for i, seen in enumerate(sparse.seen(chunk)):
        own = slice(i * sparse.block, (i + 1) * sparse.block)
        queries = chunk.queries[:, own]
        first, end = chunk.first + own.start, seen.shape[1]
        position = torch.arange(first, end, device=values.device)[:, None]
        # Of what is chosen before its block a row sees everything, of its block's own columns, the last ones, its part.
        causal = torch.ones(end - first, end, dtype=torch.bool, device=values.device).tril_(first)
        for head, some in enumerate(seen.unbind(0)):
            some[first:] = True  # a row sees itself
            if chunk.window:
                some[: max(0, first - chunk.window + 1)] = False
            columns = some.nonzero()[:, 0]
            mask = causal[:, end - len(columns) :]
            if chunk.window:
                mask = mask & (columns > position - chunk.window)
            keys, own_values = (store[head // group].index_select(0, columns) for store in (chunk.keys, values))
            out[own, head] = _attend(queries[head], keys, own_values, mask, chunk)
    return out


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, chunk: Chunk) -> Tensor:
    """(rows, dim) over (n, dim): (rows, D_v)."""
    if not chunk.softcap:
        query, keys, values = (tensor[None, None] for tensor in (query, keys, values))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=chunk.scaling)[0, 0]
    scores = chunk.softcap * torch.tanh((query @ keys.T).float() * (chunk.scaling / chunk.softcap))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(values.dtype) @ values
