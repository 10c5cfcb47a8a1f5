"""Causal convolutions of each channel over the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sakiyomi.cache.recurrent import Around
from sakiyomi.model_executor.recurrences.base import Run, StateFunction


class ShortConv(StateFunction):
    """``causal_conv1d_fn``. The state are the inputs of the last tokens, (taps, channels), the newest one last."""

    kernel = 0

    def call(
        self,
        run: Run,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Inputs (1, channels, N) and weight (channels, taps) to (1, channels, N)."""
        from transformers.activations import ACT2FN

        fixed = [weight] if bias is None else [weight, bias]
        fused = activation in ("silu", "swish")
        rows = [hidden_states.transpose(1, 2)]
        out = run(rows, fixed, Around.SILU_AFTER if fused else 0).transpose(1, 2)
        return out if fused or activation is None else ACT2FN[activation](out)

    def shape(self, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[int, ...]:
        """See ``Recurrence``."""
        return fixed[0].shape[1], fixed[0].shape[0]

    def advance(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        return torch.cat([states[:, 1:], rows[0][:, None]], 1)

    def read(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        out = (states * fixed[0].float().t()).sum(1)
        return out + fixed[1].float() if len(fixed) > 1 else out

    def chain(self, state: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """See ``Recurrence``; all rows at once."""
        windows = torch.cat([state[1:], rows[0]]).unfold(0, len(state), 1).transpose(1, 2)
        return self.read(windows, rows, fixed), windows[-1]


class ConvModule(ShortConv):
    """The same, where a module of torch is called for it."""

    def call(self, run: Run, module: Any, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Inputs (1, channels, N) to (1, channels, N)."""
        return super().call(run, hidden_states, module.weight.squeeze(1), module.bias)
