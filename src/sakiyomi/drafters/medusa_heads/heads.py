"""Medusa heads: residual blocks on the hidden state that the target's head reads, and heads over the vocabulary.

Cai et al. 2024, arXiv 2401.10774, section 2.1. Head k, counted from 0, guesses the token k + 2 places behind the one
whose hidden state it reads; the next token is the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sakiyomi.core.errors import InputError


@dataclass(frozen=True)
class HeadsShape:
    """How heads are built.

    Attributes:
        heads: tokens that are guessed.
        layers: residual blocks of each; none are shared.
        hidden_size: of the target.
        vocab_size: tokens that a guess is about; None: as the target has, whose head is used.
        own: heads over the vocabulary that belong to them: as many as heads ("version 1"), 1 for all, or 0, where the
            target's own is used ("version 2").
        bias: whether blocks have one.
    """

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int | None
    own: int
    bias: bool = True

    def __post_init__(self) -> None:
        sizes = (self.heads, self.layers, self.hidden_size, *([self.vocab_size or 0] if self.own else []))
        if min(sizes) < 1 or self.own not in (0, 1, self.heads):
            raise InputError(f"{self} describes no heads; expected 1 or more of each, and own of 0, 1 or heads")


class MedusaHeads(nn.Module):
    """All heads together; each of their layers is one batched multiplication.

    A new block has zero weights and adds nothing, so a head with the target's own head over the vocabulary begins as a
    copy of the target's prediction.

    Args:
        shape: how they are built.
        dtype, device: of the weights.

    Attributes:
        weights: (layers, heads, hidden, hidden), as ``nn.Linear`` has them.
        biases: (layers, heads, hidden); None: blocks have none.
        own: (``shape.own``, vocab, hidden); None: the target's head is used.
        token_map: (vocab) ids of the target's tokens, where a guess is about some of them; None: about all.
    """

    token_map: Tensor | None

    def __init__(self, shape: HeadsShape, dtype: torch.dtype = torch.float32, device: str | None = None) -> None:
        super().__init__()
        self.shape = shape

        def zeros(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*sizes, dtype=dtype, device=device))

        self.weights = zeros(shape.layers, shape.heads, shape.hidden_size, shape.hidden_size)
        self.biases = zeros(shape.layers, shape.heads, shape.hidden_size) if shape.bias else None
        self.own = zeros(shape.own, shape.vocab_size or 0, shape.hidden_size) if shape.own else None
        self.register_buffer("token_map", None)

    def features(self, hidden: Tensor) -> Tensor:
        """What the heads over the vocabulary read.

        Args:
            hidden: (rows, hidden) what the target's own head reads.

        Returns:
            (heads, rows, hidden).
        """
        x = hidden.expand(self.shape.heads, *hidden.shape)
        for layer, weight in enumerate(self.weights):
            y = x @ weight.mT
            if self.biases is not None:
                y = y + self.biases[layer][:, None].to(y.dtype)  # in the precision of the pass
            x = x + F.silu(y)
        return x

    def forward(self, hidden: Tensor, head: Tensor | None = None) -> Tensor:
        """Logits of the guesses.

        Args:
            hidden: (rows, hidden).
            head: (vocab, hidden) weight of the target's own head; needed where there are none of theirs.

        Returns:
            (heads, rows, vocab), in the order of ``token_map`` where there is one.

        Raises:
            InputError: they use the target's head, and it was not given.
        """
        features = self.features(hidden)
        if self.own is not None:
            return features @ self.own.mT
        if head is None:
            raise InputError("these heads use the target's own head over the vocabulary; pass its weight as head")
        return features @ head.mT

    @torch.no_grad()
    def begin_from(self, head: Tensor) -> None:
        """Give every head over the vocabulary the weight of the target's, (vocab, hidden)."""
        if self.own is not None:
            self.own.copy_(head.expand_as(self.own))
