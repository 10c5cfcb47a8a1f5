"""Mamba: a state-space model with a decay for each channel and state (Gu and Dao 2023, arXiv 2312.00752)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.recurrent import Site
from sakiyomi.model_executor.recurrences.base import Run, StateFunction


class Mamba1(StateFunction):
    """``mamba_selective_scan``. The state is (channels, state width).

    Rows are inputs and steps (N, channels), B and C (N, state width); A (channels, state width) is the same for all.
    """

    kept, kernel = 3, 2

    def call(
        self,
        run: Run,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> Tensor:
        """Inputs and steps (1, channels, N), B and C (1, state width, N) to (1, channels, N)."""
        step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        step = F.softplus(step) if delta_softplus else step
        out = run([tensor.transpose(1, 2) for tensor in (hidden_states, step, B, C)], [A.float()]).transpose(1, 2)
        out = out if D is None else out + hidden_states * D[:, None]
        return out if z is None else out * F.silu(z)

    def shape(self, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[int, ...]:
        """See ``Recurrence``."""
        return tuple(fixed[0].shape)

    def kernel_shape(self, site: Site) -> tuple[int, int, int, int]:
        """See ``Recurrence``."""
        return 1, 1, site.state[1], site.state[0]

    def advance(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        inputs, step, gain = rows
        return states * (step[..., None] * fixed[0]).exp() + (step * inputs)[..., None] * gain[:, None]

    def read(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        return (states * rows[3][:, None]).sum(-1)
