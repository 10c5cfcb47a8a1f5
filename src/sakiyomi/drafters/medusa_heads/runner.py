"""Medusa heads as they run beside a packed target: one pass over the hidden states of all requests."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.drafters.medusa_heads.backbone import check_heads
from sakiyomi.drafters.medusa_heads.heads import MedusaHeads
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.pack import linear_beside
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["MedusaRunner"]


class MedusaRunner:
    """Computes the logits of the heads, with the target's kernels where possible.

    The first block of all heads reads the same hidden state, so that it is one multiplication for all of them; so is
    the target's head over the vocabulary. Further blocks have a different input for each head.

    Args:
        heads: as they were read.
        target: whose hidden states they read, and whose head over the vocabulary they may use.
        name: of the heads, for messages.

    Attributes:
        heads: how many.
        width: of the hidden states.
        seconds: spent in passes so far.
        passes: made so far.
        bytes: of weights that are the heads' own.

    Raises:
        UnsupportedError: they belong to another model, or the target has an encoder.
    """

    def __init__(self, heads: MedusaHeads, target: ModelRunner, name: str) -> None:
        if target.sources is not None:
            raise UnsupportedError(
                f"draft medusa:{name}: Medusa heads need a target without an encoder; choose another draft"
            )
        width: Any = getattr(target.head, "in_features", None)
        if width is None:
            width = next(target.head.parameters()).shape[1]
        check_heads(heads, int(width), target.vocab_size, name)
        self._target, self._shape = target, heads.shape
        self.heads, self.width = heads.shape.heads, heads.shape.hidden_size
        self.seconds, self.passes = 0.0, 0
        self.bytes = sum(weight.nbytes for weight in heads.parameters())
        heads = heads.to(target.device, target.dtype)
        self._weights, self._biases = heads.weights.detach(), None if heads.biases is None else heads.biases.detach()
        self._map = heads.token_map
        own = None if heads.own is None else heads.own.detach()
        self._given = own
        self._generation = -1
        self._pack()

    def _pack(self) -> None:
        """Pack the weights for the target's kernels; called again when the target changes to other kernels."""
        weights = self._target.weights
        self._generation, tables = weights.generation, weights.packed
        bits = 16 if self._target.weights.quantization is None else 8
        bias = None if self._biases is None else self._biases[0].flatten()
        self._first = linear_beside(tables, self._weights[0].flatten(0, 1), bias, bits)
        self._further = [
            [
                linear_beside(tables, weight, None if self._biases is None else self._biases[layer][head], bits)
                for head, weight in enumerate(self._weights[layer])
            ]
            for layer in range(1, self._shape.layers)
        ]
        self._own = (
            None if self._given is None else [linear_beside(tables, weight, None, bits) for weight in self._given]
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits (heads, rows, V) behind hidden states (rows, hidden)."""
        began = time.perf_counter()
        target = self._target
        with torch.no_grad(), target.lock:
            if self._generation != target.weights.generation:
                self._pack()
            target.begin(BatchPlan([]), len(hidden))  # its weights: other models may have had a pass meanwhile
            logits = self._logits(hidden.to(self._weights.dtype))
            if logits.device.type == "cuda":
                torch.cuda.synchronize(logits.device)
        self.seconds += time.perf_counter() - began
        self.passes += 1
        return logits

    def _logits(self, hidden: Tensor) -> Tensor:
        rows, width = hidden.shape
        y = self._first(hidden).view(rows, self.heads, width)
        x = (hidden[:, None] + F.silu(y)).transpose(0, 1).contiguous()
        for block in self._further:
            x = x + F.silu(torch.stack([linear(part) for linear, part in zip(block, x, strict=True)]))
        if self._own is None:
            said: Tensor = self._target.head(x.flatten(0, 1))
            return said.view(self.heads, rows, -1)
        if len(self._own) == 1:
            logits = self._own[0](x.flatten(0, 1)).view(self.heads, rows, -1)
        else:
            logits = torch.stack([head(part) for head, part in zip(self._own, x, strict=True)])
        missing = self._target.vocab_size - logits.shape[-1]
        if self._map is not None:
            wide: Tensor = logits.new_full((*logits.shape[:-1], self._target.vocab_size), -torch.inf)
            wide[..., self._map] = logits
            return wide
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
