"""Retaining heads: one score for each token and KV head of a layer, from what the layer projects.

Huang et al. 2024, Locret, arXiv 2410.01805, section 3: ``[Q, K, V] W1``, an activation, ``W2``. The score (causal
importance score, CIS) of a token never changes: it is computed once, from that token alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import InputError, UnsupportedError

LARGE = 2048  # width of hidden states from which on heads are as wide as the paper's
WIDE, NARROW = 1024, 256


@dataclass(frozen=True)
class RetainingShape:
    """How heads are built.

    Attributes:
        widths: of each attention layer: values of queries, keys and values side by side, as the projections give them.
        kv_heads: of each attention layer.
        hidden: width of the heads' own layer (``d_R`` in the paper).
        activation: transformers' name of it; the paper takes the model's own.
    """

    widths: tuple[int, ...]
    kv_heads: tuple[int, ...]
    hidden: int
    activation: str = "silu"

    def __post_init__(self) -> None:
        if not self.widths or len(self.widths) != len(self.kv_heads) or min(*self.widths, *self.kv_heads) < 1:
            raise InputError(f"{self} describes no heads; expected a width and a number of KV heads of every layer")
        if self.hidden < 1:
            raise InputError(f"the heads are {self.hidden} wide; expected 1 or more")

    @property
    def layers(self) -> int:
        """Attention layers of the model."""
        return len(self.widths)


class RetainingHeads(nn.Module):
    """The heads of all layers.

    Args:
        shape: how they are built.
        dtype, device: of the weights.

    Attributes:
        first: of each layer ``Linear(width, hidden)`` without bias; `fc1` in the paper's checkpoints.
        second: of each layer ``Linear(hidden, kv_heads)`` without bias; `fc2`.
    """

    def __init__(self, shape: RetainingShape, dtype: torch.dtype = torch.float32, device: str | None = None) -> None:
        super().__init__()
        self.shape = shape

        def linear(inner: int, out: int) -> nn.Linear:
            return nn.Linear(inner, out, bias=False, dtype=dtype, device=device)

        self.first = nn.ModuleList(linear(width, shape.hidden) for width in shape.widths)
        self.second = nn.ModuleList(linear(shape.hidden, heads) for heads in shape.kv_heads)
        self.activation = activation_of(shape.activation)

    def forward(self, layer: int, qkv: Tensor) -> Tensor:
        """Scores of a layer's tokens; the higher, the longer a pair should be kept.

        Args:
            layer: counted from 0.
            qkv: (rows, width) queries, keys and values before the rotary embedding, as `Raw` gives them.

        Returns:
            (rows, kv_heads), in the dtype of the heads.
        """
        first = self.first[layer]
        if not torch.is_autocast_enabled(qkv.device.type):
            weight = first.weight
            assert isinstance(weight, Tensor)
            qkv = qkv.to(weight.dtype)
        scores: Tensor = self.second[layer](self.activation(first(qkv)))
        return scores


def activation_of(name: str) -> nn.Module:
    """The activation of this name in transformers.

    Raises:
        UnsupportedError: there is none.
    """
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise UnsupportedError(f"transformers has no activation {name!r}; expected one such as 'silu' or 'gelu'")
    found: nn.Module = ACT2FN[name]
    return found


def default_width(hidden_size: int) -> int:
    """Width of the heads' own layer: the paper's for large models; its section 5 finds that it hardly matters."""
    return WIDE if hidden_size >= LARGE else NARROW
