"""The judge of rounded weights and of caches within a budget, with which only our engine computes: its own passes, of
other shapes than the text's.

It cannot tell whether the rounded weights are good ones, nor find an error that all passes share: perplexity and
``ModelRunner.rounding`` are for that. It tells whether a drafted text is the one that the same weights write plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sakiyomi.evaluation.audit.hf_reference import Referee
from sakiyomi.kernels.batch import SequenceRows

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["OwnReferee"]


class OwnReferee(Referee):
    """Judges texts by the logits of a packed model.

    Args:
        model: its cache lends a slot: no request may hold all of them.
    """

    model: ModelRunner

    def __init__(self, model: ModelRunner) -> None:
        super().__init__(model)

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(len(tokens), V) float32: row i predicts ``tokens[i]``; one pass from border to border, as over a prompt."""
        return self._walk(prompt, tokens)

    def _stepped(self, prompt: Sequence[int], tokens: Sequence[int], step: int) -> Tensor:
        return self._walk(prompt, tokens, step)

    def _walk(self, prompt: Sequence[int], tokens: Sequence[int], step: int | None = None) -> Tensor:
        """Logits by passes of so many tokens behind the prompt; the cache drops what it drops of a text."""
        ids, eviction = [*prompt, *tokens[:-1]], self.model.eviction
        rows: list[Tensor] = []
        with self.model.cache.lent(len(ids)) as slot:
            eviction.begin(slot)
            at = 0
            while at < len(ids):
                behind = step is not None and at >= len(prompt)
                far = len(ids) if step is None else at + step if behind else len(prompt)
                end = min(len(ids), far, eviction.boundary(slot, len(prompt)))
                # Rows of a prompt may be computed otherwise; but behind it no row sees a part of the text only.
                prompt_rows = at < len(prompt) or (not behind and eviction.sparse is None)
                rows.append(self.model.score([SequenceRows(slot, at, ids[at:end], prompt=prompt_rows)]).logits.clone())
                if eviction.needs_log_probs:
                    eviction.add_prompt_log_probs(slot, rows[-1], ids, at, end)
                at = end if behind else eviction.reread_from(slot, len(prompt), end)
                rows[-1] = rows[-1][: len(rows[-1]) - (end - at)]
                eviction.evict(slot, len(prompt), at)
            eviction.end(slot)
        return torch.cat(rows)[len(prompt) - 1 :].float()
