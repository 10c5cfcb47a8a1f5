"""The judge of rounded weights, with which only our engine computes: its own passes, of other shapes than the text's.

It cannot tell whether the rounded weights are good ones, nor find an error that all passes share: perplexity and
``PackedModel.rounding`` are for that. It tells whether a drafted text is the one that the same weights write plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sakiyomi.kernels.plan import Segment
from sakiyomi.referee import Referee

if TYPE_CHECKING:
    from sakiyomi.model import PackedModel

__all__ = ["OwnReferee"]


class OwnReferee(Referee):
    """Judges texts by the logits of a packed model.

    Args:
        model: its cache lends a slot: no request may hold all of them.
    """

    model: PackedModel

    def __init__(self, model: PackedModel) -> None:
        super().__init__(model)

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(len(tokens), V) float32: row i predicts ``tokens[i]``; one pass, as over a prompt."""
        ids = [*prompt, *tokens[:-1]]
        with self.model.cache.lent(len(ids)) as slot:
            return self.model.score([Segment(slot, 0, ids, prompt=True)])[len(prompt) - 1 :].float()

    def _stepped(self, prompt: Sequence[int], tokens: Sequence[int], step: int) -> Tensor:
        ids = [*prompt, *tokens[:-1]]
        with self.model.cache.lent(len(ids)) as slot:
            rows = [self.model.score([Segment(slot, 0, list(prompt), prompt=True)], last=True).clone()]
            for start in range(len(prompt), len(ids), step):
                rows.append(self.model.score([Segment(slot, start, ids[start : start + step])]).clone())
        return torch.cat(rows).float()
