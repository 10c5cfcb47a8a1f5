"""Linear layers that read the same rows, as one product: on a GPU a product of few rows costs as much as its launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sakiyomi.core.hooks import unchanged


class _Product:
    """Several layers' weights in one tensor; the first layer that is called computes the results of all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight = _together([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = _together(biases) if biases else None
        self._rows: Tensor | None = None
        self._made: dict[int, Tensor] = {}

    def take(self, place: int, rows: Tensor) -> Tensor:
        """The result of the layer at this place for rows."""
        if rows is not self._rows or place not in self._made:
            parts = F.linear(rows, self.weight, self.bias).split(self.sizes, -1)
            self._rows, self._made = rows, dict(enumerate(parts))
        found = self._made.pop(place)
        if not self._made:
            self._rows = None
        return found


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Join parameters into one tensor; they become views of it."""
    joined = torch.cat([part.data for part in parts])
    for part, piece in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = piece
    return joined


class _Part(nn.Linear):
    """A layer of a product."""

    def __init__(self, layer: nn.Linear, product: _Product, place: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._product, self._place = product, place

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self._product.take(self._place, rows)


def join_linears(model: nn.Module, siblings: Sequence[Sequence[nn.Module]]) -> int:
    """Join plain linear layers on one GPU that read the same rows; returns the number of products.

    Args:
        model: changed in place; the parameters stay the same objects, with other memory.
        siblings: layers that read the same rows in every pass.
    """
    places = {id(child): (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    count = 0
    for group in siblings:
        layers = [layer for layer in group if type(layer) is nn.Linear and _plain(layer)]
        kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
        if len(layers) < 2 or len(layers) < len(group) or len(kinds) > 1:
            continue
        product = _Product(layers)
        for place, layer in enumerate(layers):
            parent, name = places[id(layer)]
            setattr(parent, name, _Part(layer, product, place))
        count += 1
    return count


def _plain(layer: nn.Linear) -> bool:
    """Whether a layer is an unchanged linear layer with a plain weight on a GPU."""
    return unchanged(layer) and type(layer.weight) is nn.Parameter and layer.weight.device.type == "cuda"
