"""InfLLM: all pairs stay in main memory, and relevant blocks are fetched (Xiao et al. 2024, arXiv 2402.04617)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.policies.base import View
from sakiyomi.cache.policies.looking import Looking


@dataclass(kw_only=True, eq=False)
class InfLLM(Looking):
    """All pairs stay in main memory; attention reads the first ones, the last ones and the best blocks of the others.

    A block's representatives are the keys with the most attention from the rows of its own chunk. Its relevance is the
    largest attention that one of the last rows, in one head, would give it among all representatives; all heads of a
    layer read the same blocks. The paper takes the product of mean query and mean representative, which hides a single
    row that needs something far away (``benchmarks/log/policies-measured.md``).

    Blocks are chosen at boundaries: after every chunk, and every 16 generated tokens, where the paper chooses at each
    token. A prompt's last 16 tokens choose blocks and are read again with them, so a question at the end is answered
    with the blocks that it needs. Pairs keep their positions, or move together with ``positions="reassigned"``; the
    paper gives all far pairs one distance.

    Attributes:
        block: tokens of one.
        representatives: keys of a block.
        ranking: of blocks: "most", as above, or "mean": the paper's product of mean query and mean representative,
            summed over the heads of a layer.
    """

    name: ClassVar[str] = "infllm"
    recalls: ClassVar[bool] = True
    interval: ClassVar[int] = 16
    reread_tokens: ClassVar[int] = 16
    published: ClassVar[Mapping[str, Any]] = {
        "sinks": 128,
        "block": 128,
        "representatives": 4,
        "recent": 2048 / 4224,
        "ranking": "mean",
    }

    sinks: int = 16
    block: int = 16
    representatives: int = 8
    recent: float = 0.25
    ranking: Literal["most", "mean"] = "most"

    def least_of(self, budget: int) -> int:
        """A block too."""
        return super().least_of(budget) + self.block

    def score(self, view: View) -> Tensor:
        """How much rows of its own chunk looked at each pair; what came before the chunk is not read for it."""
        among = replace(view, keys=view.keys[:, view.keys.shape[1] - view.new_count :])
        return torch.cat([view.previous_scores, self.total(among)], 1)

    def rank(self, view: View, scores: Tensor) -> Tensor:
        """The relevance of each pair's block; what is behind the last whole block is recent."""
        assert view.observations is not None
        heads, n, dim = view.keys.shape
        blocks, several = n // self.block, min(self.representatives, self.block)
        chosen = scores[:, : blocks * self.block].unflatten(1, (blocks, self.block)).topk(several, 2).indices
        keys = view.keys[:, : blocks * self.block].unflatten(1, (blocks, self.block))
        some = keys.gather(2, chosen[..., None].expand(-1, -1, -1, dim)).flatten(1, 2).float()
        rows = (
            view.observations[-self.reread_tokens :]
            .float()
            .view(-1, view.all_heads, view.observations.shape[1] // view.all_heads // dim, dim)
        )
        if self.ranking == "mean":
            means = some.unflatten(1, (blocks, several)).mean(2)
            relevance = (rows[:, view.heads].mean((0, 2))[:, None] * means).sum((0, 2))
        else:
            looks = (rows[:, view.heads].permute(1, 0, 2, 3).flatten(1, 2) @ some.mT).softmax(2)
            relevance = looks.unflatten(2, (blocks, several)).sum(3).amax((0, 1))
        relevance = relevance.repeat_interleave(self.block)
        return F.pad(relevance, (0, n - len(relevance)), value=torch.inf).expand(heads, -1)
