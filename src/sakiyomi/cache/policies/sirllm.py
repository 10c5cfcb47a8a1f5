"""SirLLM: the least probable tokens stay (Yao et al. 2024, arXiv 2405.12528)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sakiyomi.cache.policies.base import Policy, View


@dataclass(kw_only=True, eq=False)
class SirLLM(Policy):
    """-log p of each token given those before it: one score for all layers and heads.

    ``recent`` is the share of the budget for the last tokens.
    """

    name: ClassVar[str] = "sirllm"
    needs_log_probs: ClassVar[bool] = True
    published: ClassVar[Mapping[str, Any]] = {"sinks": 4, "recent": 1000 / 17388, "positions": "reassigned"}
    recent: float = 0.15

    def score(self, view: View) -> Tensor:
        """What it was when the token came."""
        assert view.neg_log_prob is not None
        return torch.cat(
            [view.previous_scores, view.neg_log_prob.to(view.previous_scores).expand(view.keys.shape[0], -1)], 1
        )
