"""LoCoCo: pairs that a cache would drop are merged into a few by a trained convolution.

Cai et al. 2024, arXiv 2406.05317. Of the pairs that are not among the best, the ``merged`` best ones are anchors. A
convolution along the text over keys and values side by side gives each anchor a weight for every one of those pairs;
the weights go through a softmax over the pairs, and each anchor becomes a mixture of itself and of their mean::

    W' = (1 - norm) * onehot(anchors) + norm * softmax(conv([K; V])),  K' = W' K,  V' = W' V
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import InputError

KERNEL = 21
"""Pairs side by side that a weight depends on, as in the paper."""
NORM = 0.5
"""Share of the mean in an anchor before training, as in the paper."""


@dataclass(frozen=True)
class MergingShape:
    """How convolutions are built.

    Attributes:
        dims: of each attention layer the sizes of a key and of a value; its heads share one convolution.
        kv_heads: of each attention layer.
        merged: pairs that they make of each head.
        kernel: odd.
        again: mixtures get the least score of their head, as in the paper, so that at the next boundary they are merged
            into others; else each keeps its anchor's, and stays as long as that would.
    """

    dims: tuple[tuple[int, int], ...]
    kv_heads: tuple[int, ...]
    merged: int
    kernel: int = KERNEL
    again: bool = True

    @property
    def layers(self) -> int:
        """Attention layers of the model."""
        return len(self.dims)

    def __post_init__(self) -> None:
        sizes = (*self.kv_heads, *(size for pair in self.dims for size in pair), self.merged, self.kernel)
        if not self.dims or len(self.dims) != len(self.kv_heads) or min(sizes) < 1 or not self.kernel % 2:
            raise InputError(
                f"{self} describes no convolutions; expected sizes of 1 or more of every layer, and an odd kernel"
            )


class Convolutions(nn.Module):
    """The convolutions of all layers.

    Args:
        shape: how they are built.
        dtype: of the weights.
        norm: share of the mean in every anchor before training.

    Attributes:
        convolutions: of each layer ``Conv1d(key and value, merged, kernel)``.
        norms: of each layer (key heads, merged): the share of the mean in each anchor. The paper has one of a layer;
            heads that look things up need their keys as they are, others need them less.
    """

    def __init__(self, shape: MergingShape, dtype: torch.dtype = torch.float32, norm: float = NORM) -> None:
        super().__init__()
        self.shape = shape
        self.convolutions = nn.ModuleList(
            nn.Conv1d(sum(dims), shape.merged, shape.kernel, padding=shape.kernel // 2, dtype=dtype)
            for dims in shape.dims
        )
        self.norms = nn.ParameterList(
            nn.Parameter(torch.full((heads, shape.merged), norm, dtype=dtype)) for heads in shape.kv_heads
        )

    def forward(
        self, layer: int, keys: Tensor, values: Tensor, best: Tensor, heads: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Merge what does not stay.

        Args:
            layer: counted from 0.
            keys, values: (h, n, dim) of all pairs, in the order of the text.
            best: (h, b) int64, columns that stay, the best first; the last ``merged`` of them are the anchors.
            heads: which of the layer's these are.

        Returns:
            The anchors' columns, ascending (h, merged), and what their keys and values become, in the dtype of those.
        """
        count = self.shape.merged
        apart = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        apart.scatter_(1, best[:, :-count], False)
        rest = apart.nonzero()[:, 1].view(len(keys), -1)
        anchors = best[:, -count:].sort(1).values
        weight = self.convolutions[layer].get_parameter("weight")
        read = [_taken(pairs, rest).float() for pairs in (keys, values)]
        shares = self.convolutions[layer](torch.cat(read, 2).mT.to(weight.dtype)).float().softmax(2)
        norm = self.norms[layer][heads, :, None].float()
        made = [
            ((1 - norm) * _taken(pairs, anchors).float() + norm * (shares @ of_rest)).to(pairs.dtype)
            for pairs, of_rest in zip((keys, values), read, strict=True)
        ]
        return anchors, made[0], made[1]

    def scored(self, scores: Tensor, anchors: Tensor) -> Tensor:
        """Scores (h, n) when the columns ``anchors``, (h, merged), have become mixtures."""
        if not self.shape.again:
            return scores
        return scores.scatter(1, anchors, scores.amin(1, keepdim=True).expand_as(anchors))


def _taken(pairs: Tensor, columns: Tensor) -> Tensor:
    """These columns of (h, n, dim)."""
    return pairs.gather(1, columns[..., None].expand(-1, -1, pairs.shape[2]))
