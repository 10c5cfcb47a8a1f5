"""Random pairs: the baseline that a score must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sakiyomi.cache.policies.base import Policy, View


@dataclass(kw_only=True, eq=False)
class Random(Policy):
    """A fixed random number for every place, layer and head."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def score(self, view: View) -> Tensor:
        """Uniform numbers, by an integer hash (the finalizer of splitmix64 on 31 bits would do as well)."""
        heads = torch.arange(view.heads.start, view.heads.stop, device=view.places.device)[:, None]
        x = view.places * 0x9E3779B1 + (view.layer * 131 + heads) * 0x85EBCA6B + self.seed * 0xC2B2AE35
        for _ in range(2):
            x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
        return x.float()
