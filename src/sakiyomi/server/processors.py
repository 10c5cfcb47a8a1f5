"""Logits processors of the server's own. Like all of them they are given each row's own path as history, so that they
work on every node of a draft's tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Penalties"]


class Penalties:
    """OpenAI's penalties: frequency x count + presence is taken from the logits of tokens written so far.

    Args:
        frequency: for each time.
        presence: once.
        prompt: how many tokens do not count: they were not written.
    """

    def __init__(self, frequency: float, presence: float, prompt: int) -> None:
        self._frequency, self._presence, self._prompt = frequency, presence, prompt

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """See transformers' ``LogitsProcessor``: (1, length) and (1, V)."""
        tokens, counts = torch.unique(history[0, self._prompt :], return_counts=True)
        scores[0, tokens] -= self._frequency * counts.to(scores.dtype) + self._presence
        return scores
