"""Mamba-2: a state-space model with one decay for each head (Dao and Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sakiyomi.model_executor.recurrences.base import LinearAttention, Run, spread

__all__ = ["Mamba2"]


class Mamba2(LinearAttention):
    """``mamba2_chunk_scan``. The state is (heads, state width, head width).

    Rows are inputs times their step (N, heads, head width), B (N, groups, state width), log decays (N, heads), and C
    like B.
    """

    kept = 3

    def call(
        self,
        run: Run,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int = 0,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> Tensor:
        """Inputs (1, N, heads, width), steps (1, N, heads), B and C (1, N, groups, width) to outputs like inputs."""
        step = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
        step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit).float()
        inputs = hidden_states[0].float()
        out = run([inputs * step[..., None], B[0].float(), A.float() * step, C[0].float()])
        return (out if D is None else out + D[..., None] * inputs)[None]

    def advance(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        inputs, groups, decay = rows
        return states * decay.exp()[..., None, None] + spread(groups, states)[..., None] * inputs[..., None, :]
