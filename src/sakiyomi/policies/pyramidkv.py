"""PyramidKV: larger budgets for lower layers (Cai et al. 2024, arXiv 2406.02069)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sakiyomi.policies.snapkv import SnapKV

__all__ = ["PyramidKV", "pyramid"]


def pyramid(budget: int, layers: int, least: int, beta: float = 20.0) -> list[int]:
    """Pairs of each layer's heads, falling evenly from the first layer to the last, ``budget`` on average.

    Args:
        budget: pairs of a head on average.
        layers: how many.
        least: pairs that stay in any case, the same in every layer.
        beta: the last layer has 1 / beta of what the budget leaves beside those.
    """
    share = budget - least
    low = share / beta
    high = 2 * share - low
    if layers == 1:
        return [budget]
    return [least + round(high - i * (high - low) / (layers - 1)) for i in range(layers)]


@dataclass(kw_only=True, eq=False)
class PyramidKV(SnapKV):
    """SnapKV's scores, with budgets by layer."""

    name: ClassVar[str] = "pyramidkv"
    beta: float = 20.0

    def budgets(self, budget: int, heads: Sequence[int]) -> list[list[int]]:
        """Falling from layer to layer."""
        by_layer = pyramid(budget, len(heads), self.least_of(budget), self.beta)
        return [[own] * count for own, count in zip(by_layer, heads, strict=True)]
