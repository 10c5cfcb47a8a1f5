"""Judges texts by the engine's own passes: for quantized weights and evicting caches, which transformers does not have.

It tells whether a drafted text is the one that the same weights write without a draft. It cannot tell how good the
quantized weights are, nor find an error that all passes share: perplexity and ``ModelRunner.quantization`` do that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sakiyomi.evaluation.audit.hf_reference import HFReference
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["EngineReference"]


class EngineReference(HFReference):
    """Judges texts by the logits of a ``ModelRunner``.

    Args:
        model: lends a slot of its cache, so that requests must not hold all of them.
    """

    model: ModelRunner

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(len(tokens), V) float32: row i predicts ``tokens[i]``; a pass from one eviction boundary to the next."""
        return self._walk(prompt, tokens)

    def _stepped(self, prompt: Sequence[int], tokens: Sequence[int], step: int) -> Tensor:
        return self._walk(prompt, tokens, step)

    def _walk(self, prompt: Sequence[int], tokens: Sequence[int], step: int | None = None) -> Tensor:
        """Logits by passes of so many tokens behind the prompt; the cache evicts as it does in generation."""
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
