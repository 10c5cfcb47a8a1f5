"""The target's own first layers read ahead: no second model, and no second cache.

The layers' keys and values of committed tokens lie in the target's cache already. Those of drafted tokens are written
behind them, and the pass that scores the draft overwrites them with the same columns of all layers. How good such a
draft is depends on the model: few are trained to say what they think after half of their layers (LayerSkip, Elhoushi et
al. 2024, arXiv 2404.16710, trains for it; section 4.3 there is this way of drafting).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sakiyomi.drafters.base import Context
from sakiyomi.errors import MemoryLimitError
from sakiyomi.kernels.plan import Segment
from sakiyomi.numerics import draw
from sakiyomi.sampling import Sampler
from sakiyomi.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.warping import best, best_token

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.layers import FirstLayers

__all__ = ["EarlyExit"]


class EarlyExit:
    """Drafts a chain by an earlier exit from the target, one pass of its first layers a token.

    Args:
        model: the target's first layers, on the target's cache.
    """

    name = "early-exit"
    kind: DraftKind = "chain"

    def __init__(self, model: FirstLayers) -> None:
        self.model = model

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the passes so far."""
        return self.model.forward_seconds

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass a depth."""
        wanted = zip(contexts, gammas, strict=True)
        chains = [_Chain(self.name, context, gamma, self.model) for context, gamma in wanted]
        while active := [chain for chain in chains if not chain.done]:
            logits = self.model.score([chain.segment() for chain in active])
            for chain, row in zip(active, logits, strict=True):
                chain.extend(row)
        return [chain.draft() for chain in chains]


class _Chain:
    """The draft of one request while it grows."""

    def __init__(self, name: str, context: Context, gamma: int, model: FirstLayers) -> None:
        self.name, self.context, self.width = name, context, model.vocab_size
        # The last drafted token is never read, so that gamma columns do: of the last committed one and the others.
        self.gamma = min(gamma, model.max_context - len(context.tokens))
        self.tokens: list[int] = []
        self.chances: list[float | None] = []
        self.rows: list[Tensor] = []
        self.stopped = False
        sampler = context.memory.get(name)
        if sampler is None:
            sampler = context.memory[name] = Sampler(context.params, self.width)
        self.sampler: Sampler = sampler
        try:
            model.cache.reserve(context.slot, len(context.tokens) - 1 + self.gamma)
        except MemoryLimitError:
            self.stopped = True

    @property
    def done(self) -> bool:
        ended = bool(self.tokens) and self.tokens[-1] in self.context.stop_ids
        return self.stopped or ended or len(self.tokens) >= self.gamma

    def segment(self) -> Segment:
        """The row of the last token, behind all before it."""
        last = self.tokens[-1] if self.tokens else self.context.tokens[-1]
        return Segment(self.context.slot, len(self.context.tokens) - 1 + len(self.tokens), [last])

    def extend(self, logits: Tensor) -> None:
        """Choose the next token from the logits (V,) of the last one."""
        try:
            self._choose(logits)
        except Exception:
            # The user's own processor, or no token left: the target's rows meet it too, and end this request alone.
            self.stopped = True

    def _choose(self, logits: Tensor) -> None:
        context = self.context
        if self.sampler.edits:
            logits = self.sampler.process(logits[None], [self.tokens], context.tokens)[0]
        if context.rule == "greedy":
            token, chance = best(logits) if logits.is_cpu else (best_token(logits), None)
        else:
            probs = np.empty(self.width, np.float32)
            support = self.sampler.fill(logits, probs)
            if context.rule == "coupled":
                token = context.noise.top(len(context.tokens) + len(self.tokens), probs, support=support)[0]
            else:
                token = draw(probs, context.noise.fork(self.name).uniform(), support)
                self.rows.append(torch.from_numpy(probs))
            chance = float(probs[token])
        self.tokens.append(token)
        self.chances.append(chance)

    def draft(self) -> Draft:
        """What was drafted, with the rows it was drawn from where it was drawn."""
        drawn = bool(self.rows)
        draws = tuple(Draw(i, self.name, i if drawn else None, chance) for i, chance in enumerate(self.chances))
        kind: DraftKind = "chain" if drawn else "point_mass"
        return Draft(TokenTree.chain(self.tokens), kind, draws, torch.stack(self.rows) if drawn else None)
