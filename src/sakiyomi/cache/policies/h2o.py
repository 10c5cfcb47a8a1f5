"""H2O: heavy hitters by accumulated attention (Zhang et al. 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.policies.base import View
from sakiyomi.cache.policies.looking import Looking


@dataclass(kw_only=True, eq=False)
class H2O(Looking):
    """Attention that a pair has received from all rows behind it, summed over the query heads of its head.

    The paper keeps as many recent tokens as heavy hitters; ``recent`` is their share of the budget.
    """

    name: ClassVar[str] = "h2o"
    sinks: int = 0
    recent: float = 0.5

    def score(self, view: View) -> Tensor:
        """Sums so far."""
        return sum((seen.sum((1, 2)) for seen in self.looks(view)), F.pad(view.previous_scores, (0, view.new_count)))
