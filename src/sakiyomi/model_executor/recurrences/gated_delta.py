"""Gated delta rules: a decay, then a correction of what the state has for a key (Yang et al. 2024, 2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sakiyomi.model_executor.recurrences.base import LinearAttention, Run, spread

__all__ = ["GatedDelta", "KimiDelta"]

EPSILON = 1e-6  # of transformers' and FLA's normalization of queries and keys


class GatedDelta(LinearAttention):
    """``torch_chunk_gated_delta_rule``. The state is (heads, key width, value width).

    Rows are values (N, heads, value width), keys (N, key heads, key width), log decays (N, heads, 1 or key width), the
    rate of correction (N, heads), and queries like keys.
    """

    kept = 4

    def call(
        self,
        run: Run,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Queries, keys and values (1, N, heads, width), log decay and rate (1, N, heads) to (1, N, heads, width)."""
        queries, keys = query[0].float(), key[0].float()
        if use_qk_l2norm_in_kernel:
            queries, keys = self.normal(queries), self.normal(keys)
        queries = queries * queries.shape[-1] ** -0.5
        decay = g[0].float()
        decay = decay[..., None] if decay.ndim == 2 else decay
        out = run([value[0].float(), keys, decay, beta[0].float(), queries])
        return out.to(query.dtype)[None], None

    def normal(self, rows: Tensor) -> Tensor:
        """Rows of length 1."""
        return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + EPSILON)

    def advance(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        values, keys, decay, rate = rows
        states = states * decay.exp()[..., None]
        keys = spread(keys, states)
        change = (values - (states * keys[..., None]).sum(-2)) * rate[..., None]
        return states + keys[..., None] * change[..., None, :]


class KimiDelta(GatedDelta):
    """``chunk_kimi_delta_attention``: a decay for every key channel (Kimi Linear, arXiv 2510.26692)."""

    def normal(self, rows: Tensor) -> Tensor:
        """Rows of length 1; rounded otherwise."""
        return rows / torch.sqrt((rows * rows).sum(-1, keepdim=True) + EPSILON)
