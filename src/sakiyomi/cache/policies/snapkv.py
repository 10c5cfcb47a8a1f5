"""SnapKV: attention of the last rows (Li et al. 2024, arXiv 2404.14469); PyramidKV: larger budgets for lower layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.policies.base import View
from sakiyomi.cache.policies.looking import Looking


@dataclass(kw_only=True, eq=False)
class SnapKV(Looking):
    """Mean attention of the last ``window`` rows, smoothed over neighbours; the window itself stays.

    Between the chunks of a prompt the rows are the chunk's last ones, at its end those of the question.
    """

    name: ClassVar[str] = "snapkv"
    sinks: int = 0
    window: int = 32
    kernel: int = 5

    def least_of(self, budget: int) -> int:
        """The window too."""
        return super().least_of(budget) + max(0, self.window - self.local)

    def score(self, view: View) -> Tensor:
        """Mean over rows and the query heads of a head, then over neighbours."""
        total = self.total(view, self.window)
        return F.avg_pool1d(total, self.kernel, 1, self.kernel // 2, count_include_pad=False)

    def pinned(self, view: View) -> Tensor:
        """The window too."""
        return super().pinned(view) | (view.places >= view.length - self.window)


@dataclass(kw_only=True, eq=False)
class PyramidKV(SnapKV):
    """SnapKV's scores, with budgets that fall from the first layer to the last (Cai et al. 2024, arXiv 2406.02069)."""

    name: ClassVar[str] = "pyramidkv"
    pyramid: float = 20.0
