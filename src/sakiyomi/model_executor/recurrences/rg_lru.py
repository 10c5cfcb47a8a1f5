"""RG-LRU: a gated linear recurrence in each channel (De et al. 2024, arXiv 2402.19427)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from sakiyomi.model_executor.recurrences.base import Run, StateFunction


class RgLru(StateFunction):
    """``RecurrentGemmaRglru._rnn_scan``. The state is (channels,); rows are inputs and decays (N, channels)."""

    kept, kernel = 2, 3

    def call(
        self, run: Run, module: nn.Module, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        """Inputs and decays (1, N, channels), and whether a text begins (1, N, 1), to (1, N, channels)."""
        decay = recurrent_gate * ~reset
        return run([hidden_states, decay]), None

    def shape(self, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[int, ...]:
        """See ``Recurrence``."""
        return tuple(rows[0].shape[2:])

    def advance(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        return rows[1] * states + rows[0]

    def read(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        return states
