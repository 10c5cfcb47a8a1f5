"""Mamba-2: a state-space model with one decay for each head (Dao and Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.recurrent import Around
from sakiyomi.model_executor.recurrences.base import LinearAttention, Run


class Mamba2(LinearAttention):
    """``mamba2_chunk_scan``. The state is (heads, state width, head width).

    Rows are inputs (N, heads, head width), B (N, groups, state width), steps (N, heads), and C like B. The rates of
    decay, what is added to steps, and what of inputs goes straight into outputs, (heads) each, are the same for all.
    """

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
        dt_limit: tuple[float, float] = (0.0, math.inf),
        **_: Any,
    ) -> Tensor:
        """Inputs (1, N, heads, width), steps (1, N, heads), B and C (1, N, groups, width) to outputs like inputs."""
        around = Around.AS_SCAN | (Around.SOFTPLUS_STEPS if dt_softplus else 0)
        if not dt_softplus or tuple(dt_limit) != (0.0, math.inf):  # steps are cut, which softplus alone needs not
            step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt, dt_bias = (nn.functional.softplus(step) if dt_softplus else step).clamp(*dt_limit), None
            around = Around.AS_SCAN
        nothing = torch.zeros_like(A)
        heads = [nothing if tensor is None else tensor for tensor in (dt_bias, D)]
        return run([hidden_states, B, dt, C], [A, *heads], around)

    def prepare(self, rows: Sequence[Tensor], fixed: Sequence[Tensor], around: int) -> list[Tensor]:
        """See ``Recurrence``."""
        step = rows[2] + fixed[1].to(rows[2].dtype)
        step = (nn.functional.softplus(step) if around & Around.SOFTPLUS_STEPS else step).float()
        inputs, gain, _, readings = super().prepare(rows, fixed, around)
        return [inputs * step[0, ..., None], gain, (fixed[0].float() * step[0]).exp(), readings]

    def finish(self, out: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor], around: int) -> Tensor:
        """See ``Recurrence``."""
        return (out + fixed[2].float()[:, None] * rows[0][0].float())[None]
