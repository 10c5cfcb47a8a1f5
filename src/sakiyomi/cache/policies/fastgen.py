"""FastGen: a policy for every head (Ge et al. 2023, arXiv 2310.01801)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sakiyomi.cache.policies.base import View
from sakiyomi.cache.policies.h2o import H2O


@dataclass(kw_only=True, eq=False)
class FastGen(H2O):
    """Heads with local attention keep the last pairs, the others their heavy hitters.

    The paper gives every head the cheapest policy that recovers enough of its attention. Here all heads have the same
    budget, and each uses the policy that recovers more of its attention since the last boundary: a window and the first
    tokens, or heavy hitters and a window of half the budget. The stored score is the sum of attention in both cases.
    """

    name: ClassVar[str] = "fastgen"
    sinks: int = 4

    def pinned(self, view: View) -> Tensor:
        """Of each head, by the policy that recovers more."""
        heavy = super().pinned(view)
        spare = view.budget - int(heavy.sum(1).max())
        if spare < 0 or view.places.shape[1] <= view.budget:
            return heavy
        recent = torch.zeros_like(heavy)
        recent[:, : self.sinks] = view.places[:, : self.sinks] < self.sinks
        recent[:, recent.shape[1] - (view.budget - self.sinks) :] = True
        mass = self.total(view)
        rest = mass.masked_fill(heavy, 0.0).topk(spare, 1).values.sum(1)
        better = (mass * recent).sum(1) > (mass * heavy).sum(1) + rest
        return torch.where(better[:, None], recent, heavy)
