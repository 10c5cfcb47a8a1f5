"""Gated delta rules: a decay, then a correction of what the state has for a key (Yang et al. 2024, 2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sakiyomi.cache.recurrent import Around
from sakiyomi.model_executor.recurrences.base import LinearAttention, Run, decayed, spread

EPSILON = 1e-6  # of transformers' and FLA's normalization of queries and keys


class GatedDelta(LinearAttention):
    """``torch_chunk_gated_delta_rule``. The state is (heads, key width, value width).

    Rows are values (N, heads, value width), keys (N, key heads, key width), log decays (N, heads) or (N, heads, key
    width), the rate of correction (N, heads), and queries like keys.
    """

    length: ClassVar[Around] = Around.UNIT_LENGTH

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
        out = run([value, key, g, beta, query], (), self.length if use_qk_l2norm_in_kernel else 0)
        return out.to(query.dtype) if out.dtype != query.dtype else out, None

    def prepare(self, rows: Sequence[Tensor], fixed: Sequence[Tensor], around: int) -> list[Tensor]:
        """See ``Recurrence``."""
        values, keys, decay, rate, queries = super().prepare(rows, fixed, around)
        if around & Around.UNIT_LENGTH:
            queries, keys = (_shortened(part, around) for part in (queries, keys))
        return [values, keys, decay.exp(), rate, queries * queries.shape[-1] ** -0.5]

    def keep(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Sequence[Tensor]:
        """See ``Recurrence``."""
        values, keys, decays, rate = rows[:4]
        seen = (decayed(states, decays) * spread(keys, states)[..., None]).sum(-2)
        return [(values - seen) * rate[..., None], keys, decays]


class KimiDelta(GatedDelta):
    """``chunk_kimi_delta_attention``: a decay for every key channel (Kimi Linear, arXiv 2510.26692)."""

    length = Around.UNIT_LENGTH | Around.DIVIDED


def _shortened(rows: Tensor, around: int) -> Tensor:
    """Rows of length 1."""
    squares = (rows * rows).sum(-1, keepdim=True) + EPSILON
    return rows / torch.sqrt(squares) if around & Around.DIVIDED else rows * torch.rsqrt(squares)
