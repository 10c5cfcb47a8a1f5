"""StreamingLLM: the first tokens and the last ones (Xiao et al. 2023, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sakiyomi.cache.policies.base import Policy, View


@dataclass(kw_only=True, eq=False)
class Streaming(Policy):
    """Attention sinks and a window; the paper moves positions together, ``positions="reassigned"``."""

    name: ClassVar[str] = "streaming"
    local: int = 0

    def score(self, view: View) -> Tensor:
        """Later is better."""
        return view.places.float()


@dataclass(kw_only=True, eq=False)
class Recency(Streaming):
    """A window alone: the floor."""

    name: ClassVar[str] = "recency"
    sinks: int = 0
