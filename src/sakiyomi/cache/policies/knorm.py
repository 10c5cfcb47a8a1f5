"""Scores from keys alone: their length, and how unlike the others they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.policies.base import Policy, View


@dataclass(kw_only=True, eq=False)
class Knorm(Policy):
    """Short keys stay (Devoto et al. 2024, arXiv 2406.11430)."""

    name: ClassVar[str] = "knorm"

    def score(self, view: View) -> Tensor:
        """Less the length."""
        lengths: Tensor = torch.linalg.vector_norm(view.keys.float(), dim=-1)
        return -lengths


@dataclass(kw_only=True, eq=False)
class KeyDiff(Policy):
    """Keys stay that point away from the mean direction (Park et al. 2025, arXiv 2504.15364)."""

    name: ClassVar[str] = "keydiff"

    def score(self, view: View) -> Tensor:
        """Less the cosine."""
        unit = F.normalize(view.keys.float(), dim=-1)
        return -F.cosine_similarity(unit, unit.mean(1, keepdim=True), dim=-1)
