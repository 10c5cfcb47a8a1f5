"""TOVA: attention of the last row, one choice for all heads (Oren et al. 2024, arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sakiyomi.cache.policies.base import View
from sakiyomi.cache.policies.looking import Looking


@dataclass(kw_only=True, eq=False)
class TOVA(Looking):
    """Attention of the last row, mean over all heads of the layer."""

    name: ClassVar[str] = "tova"
    sinks: int = 0
    local: int = 1

    def score(self, view: View) -> Tensor:
        """The same for every head."""
        (seen,) = self.looks(view, 1)
        return seen.mean((0, 1, 2)).expand(view.keys.shape[:2])
