"""The target's likeliest tokens and their probabilities as labels of a draft, computed once a row and kept."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Rows of one pass of the target: one shape whatever is missing, as a compiled model compiles anew for each other shape.
CHUNK_ROWS = 4


def vocabulary(model: PreTrainedModel) -> int:
    """Rows of the output embedding: the width of the logits, which may pass the tokenizer's last id."""
    head: Any = model
    return int(head.get_output_embeddings().weight.shape[0])


def row_keys(ids: Tensor) -> list[bytes]:
    """A short name of each row of (B, T) ids."""
    return [hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=16).digest() for row in ids]


def chunks(ids: Tensor) -> Sequence[Tensor]:
    """Rows of (B, T) ids in passes of one shape; the last is filled up with zeros."""
    filled = torch.cat([ids, ids.new_zeros(-len(ids) % CHUNK_ROWS, ids.shape[1])])
    return list(torch.split(filled, CHUNK_ROWS))


class SoftLabels:
    """Labels of rows of token ids, from a frozen target.

    Args:
        target: a causal LM; evaluated without gradients.
        top: tokens kept a position (K).
        limit_bytes: memory for rows that may come again; rows past it are computed each time.
        share: of the time since the first call that making labels may take; 1: all rows have some.

    Attributes:
        seconds: that this took.
    """

    def __init__(self, target: PreTrainedModel, top: int, limit_bytes: int, share: float = 1.0) -> None:
        self._target, self._limit, self._share = target, limit_bytes, share
        self.seconds, self._began = 0.0, 0.0
        self.top = min(top, vocabulary(target))
        self._kept: dict[bytes, tuple[Tensor, Tensor]] = {}
        self._bytes = 0

    def __call__(self, ids: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of (B, T) ids: token ids (B, T, K) int64, likeliest first, and probabilities (B, T, K) float32.

        Rows for which there is no time have the text itself as labels: its next tokens (``following``, (B, T)), each
        with probability 1.
        """
        self._began = self._began or time.monotonic()
        keys = row_keys(ids)
        missing = [index for index, key in enumerate(keys) if key not in self._kept]
        fresh: dict[bytes, tuple[Tensor, Tensor]] = {}
        for some in (missing[start : start + CHUNK_ROWS] for start in range(0, len(missing), CHUNK_ROWS)):
            if self.seconds > self._share * (time.monotonic() - self._began):
                break
            began = time.monotonic()
            tokens, probs = self._compute(ids[some])
            for row, index in enumerate(some):
                fresh[keys[index]] = self._keep(keys[index], tokens[row], probs[row])
            self.seconds += time.monotonic() - began
        found = [
            fresh.get(key) or self._kept.get(key) or self._text(row) for key, row in zip(keys, following, strict=True)
        ]
        tokens = torch.stack([pair[0] for pair in found]).to(ids.device, torch.int64)
        return tokens, torch.stack([pair[1] for pair in found]).to(ids.device, torch.float32)

    def _text(self, following: Tensor) -> tuple[Tensor, Tensor]:
        """The text's own next tokens as labels; the others have probability 0, whichever they are."""
        tokens = following.to(torch.int32)[:, None].repeat(1, self.top)
        probs = torch.zeros(tokens.shape, dtype=torch.float16)
        probs[:, 0] = 1
        return tokens, probs

    def _compute(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        tokens, probs = [], []
        for rows in chunks(ids):
            with torch.no_grad():
                logits = self._target(input_ids=rows, use_cache=False).logits.float()
                top = logits.topk(self.top, dim=-1)
                # 6 bytes a label instead of 12; half precision moves a probability by 0.05 % at most.
                tokens.append(top.indices.to(torch.int32).cpu())
                probs.append((top.values - logits.logsumexp(dim=-1, keepdim=True)).exp().to(torch.float16).cpu())
        return torch.cat(tokens)[: len(ids)], torch.cat(probs)[: len(ids)]

    def _keep(self, key: bytes, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        size = tokens.numel() * tokens.element_size() + probs.numel() * probs.element_size()
        if self._bytes + size <= self._limit:
            # clone: a view would hold the whole batch in memory
            self._kept[key] = (tokens.clone(), probs.clone())
            self._bytes += size
        return tokens, probs
