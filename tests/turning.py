"""Rotary embeddings of two kinds, and packed storage fitted to numbers instead of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from sakiyomi.cache.quantized_levels import KVQuantStore
from sakiyomi.cache.rotary import Rotation, Turn


def turning(dim: int, *, neighbours: bool = False) -> Turn:
    """Keys turned as by a rotary embedding of most of their numbers, halves or neighbours as pairs."""
    width = max(2, dim * 3 // 4 // 2 * 2)
    first = torch.arange(0, width, 2) if neighbours else torch.arange(width // 2)
    second = first + 1 if neighbours else first + width // 2
    frequency = 10000.0 ** -(torch.arange(width // 2) * 2 / width)

    def turn(layer: int, keys: Tensor, by: Tensor) -> Tensor:
        angles = by[..., None] * frequency
        turned = keys.float().clone()
        a, b = keys[..., first].float(), keys[..., second].float()
        turned[..., first] = a * angles.cos() - b * angles.sin()
        turned[..., second] = b * angles.cos() + a * angles.sin()
        return turned

    return turn


def fit(packed: KVQuantStore, keys: Tensor, values: Tensor, *, neighbours: bool = False) -> None:
    """Fit every layer to these, keys (heads, n, dim) before their rotation."""
    dim = keys.shape[2]
    packed.rotation = Rotation(turning(dim, neighbours=neighbours), dim, 1 << 20, torch.device("cpu"))
    packed.rotation.reach(packed.room)
    for layer in range(len(packed.shapes)):
        packed.learn(layer, keys, values)
