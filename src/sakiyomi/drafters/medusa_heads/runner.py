"""Runs Medusa heads beside a packed target: one pass over the hidden states of all requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.drafters.beside import Beside, projection_bits
from sakiyomi.drafters.head_model import over_vocabulary
from sakiyomi.drafters.medusa_heads.backbone import check_heads
from sakiyomi.drafters.medusa_heads.heads import MedusaHeads
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.kernels.pack import linear_beside
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.kernel_rounds import Around, HeardStates
from sakiyomi.model_executor.row_layers import RowLayers
from sakiyomi.model_executor.runner import ModelRunner


class MedusaRunner(Beside):
    """Computes the logits of the heads, with the target's kernels where possible.

    The first blocks of all heads read the same hidden state and are one multiplication; so is the target's head over
    the vocabulary. Further blocks have a different input for each head.

    Args:
        heads: as they were read.
        target: whose hidden states they read, and whose head over the vocabulary they may use.
        name: of the heads, for messages.

    Attributes:
        heads: how many.
        width: of the hidden states.
        bytes: of weights that are the heads' own.
        around: how the kernels run them by themselves.

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
        super().__init__(target)
        self._shape = heads.shape
        self.heads, self.width = heads.shape.heads, heads.shape.hidden_size
        self.bytes = sum(weight.nbytes for weight in heads.parameters())
        self._given = given = heads.to(target.device, target.dtype).requires_grad_(False)
        self._prepare()
        tokens, own = given.token_map, given.own
        if tokens is not None:
            tokens = tokens.to("cpu", torch.int64).contiguous()
        said = target.vocab_size if own is None else own.shape[1]
        layers = RowLayers(target, self.width, lambda rows, *_: self._side_by_side(rows))
        heard = HeardStates((HEAD,), self.width, True, None, layers, self.heads, said, tokens)
        self.around = Around(heard=heard)

    def _pack(self, tables: PackedWeights | None) -> None:
        given, bits = self._given, projection_bits(self._host)

        def packed(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
            return linear_beside(tables, weight, bias, bits)

        biases = [None] * self._shape.layers if given.biases is None else list(given.biases.detach())
        weights = given.weights.detach()
        bias = biases[0]
        self._first = packed(weights[0].flatten(0, 1), None if bias is None else bias.flatten())
        self._further = [
            [packed(weight, None if of_layer is None else of_layer[head]) for head, weight in enumerate(layer)]
            for layer, of_layer in zip(weights[1:], biases[1:], strict=True)
        ]
        self._own = None if given.own is None else [packed(weight) for weight in given.own.detach()]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits (heads, rows, V) behind hidden states (rows, hidden)."""
        with self._timed(), self._running(len(hidden)):
            logits = self._logits(hidden.to(self._given.weights.dtype))
            if logits.device.type == "cuda":
                torch.cuda.synchronize(logits.device)
        self.passes += 1
        return logits

    def _side_by_side(self, hidden: Tensor) -> Tensor:
        """Logits (rows, heads x tokens) of the tokens that the heads know, behind hidden states (rows, hidden)."""
        self._prepare()
        return self._own_logits(hidden).transpose(0, 1).flatten(1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return over_vocabulary(self._own_logits(hidden), self._given.token_map, self._host.vocab_size)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        rows, width = hidden.shape
        y = self._first(hidden).view(rows, self.heads, width)
        x = (hidden[:, None] + F.silu(y)).transpose(0, 1).contiguous()
        for block in self._further:
            x = x + F.silu(torch.stack([linear(x[i]) for i, linear in enumerate(block)]))
        if self._own is None:
            said: Tensor = self._host.head(x.flatten(0, 1))
            return said.view(self.heads, rows, -1)
        logits: Tensor
        if len(self._own) == 1:
            logits = self._own[0](x.flatten(0, 1)).view(self.heads, rows, -1)
        else:
            logits = torch.stack([head(x[i]) for i, head in enumerate(self._own)])
        return logits
