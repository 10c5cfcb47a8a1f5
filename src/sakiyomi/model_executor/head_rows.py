"""Rows of a model's head over the vocabulary, read and written in place while the model is in use.

Only the head reads them there: an embedding with tied weights keeps its own copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.native import BLOCK, PackedLinear
from sakiyomi.model_executor.runner import ModelRunner


class HeadRows:
    """The rows of a head, one for each token.

    Args:
        model: whose head it is.

    Attributes:
        width: numbers of a row.

    Raises:
        UnsupportedError: its weights are quantized, or it is no linear layer.
    """

    def __init__(self, model: ModelRunner) -> None:
        self._model = model
        self._find()
        self.width = int(self._rows.shape[1] if self._rows.ndim == 2 else self._rows.shape[2] * self._rows.shape[3])

    def moved(self) -> bool:
        """Whether the model has new modules now: rows that were written are then lost."""
        return self._generation != self._model.weights.generation and self._find()

    def _find(self) -> bool:
        """Find the memory of the rows."""
        head, self._generation = self._model.head, self._model.weights.generation
        if isinstance(head, PackedLinear) and head.bits == 16:
            # 32 rows side by side, see `pack_weight`.
            self._rows = head.tensors()["data"].permute(0, 2, 1, 3)
            return True
        if type(head) is not nn.Linear:
            raise UnsupportedError(
                f"{type(self._model.module).__name__}'s head over the vocabulary is {type(head).__name__}"
                f"{' with quantized weights' if isinstance(head, PackedLinear) else ''}, and [learn=] changes rows of "
                "a linear layer of 16 or 32 bits; leave the option out, or choose another draft"
            )
        # A copy: the embedding, or the user's own model, may have the same weight.
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        self._rows = head.weight.data
        return True

    def read(self, tokens: Tensor) -> Tensor:
        """(tokens, width) in float32."""
        if self._rows.ndim == 2:
            return self._rows[tokens].float()
        return self._rows[tokens // BLOCK, tokens % BLOCK].flatten(1).float()

    def write(self, tokens: Tensor, rows: Tensor) -> None:
        """Replace these tokens' rows, (tokens, width), between two passes."""
        with self._model.lock, torch.no_grad():
            rows = rows.to(self._rows.dtype)
            if self._rows.ndim == 2:
                self._rows[tokens] = rows
            else:
                self._rows[tokens // BLOCK, tokens % BLOCK] = rows.unflatten(1, self._rows.shape[2:])
