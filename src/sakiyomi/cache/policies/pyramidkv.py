"""PyramidKV: larger budgets for lower layers (Cai et al. 2024, arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sakiyomi.cache.policies.snapkv import SnapKV

__all__ = ["PyramidKV"]


@dataclass(kw_only=True, eq=False)
class PyramidKV(SnapKV):
    """SnapKV's scores, with budgets that fall from the first layer to the last."""

    name: ClassVar[str] = "pyramidkv"
    pyramid: float = 20.0
