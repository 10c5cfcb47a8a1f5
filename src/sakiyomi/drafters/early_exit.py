"""The target's own first layers read ahead: no second model, and no second cache.

The layers' keys and values of committed tokens lie in the target's cache already. Those of drafted tokens are written
behind them, and the pass that scores the draft overwrites them with the same columns of all layers. How good such a
draft is depends on the model: few are trained to say what they think after half of their layers (LayerSkip, Elhoushi et
al. 2024, arXiv 2404.16710, trains for it; section 4.3 there is this way of drafting).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sakiyomi.builders import Chain, Growth
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.reading import Reading
from sakiyomi.errors import MemoryLimitError
from sakiyomi.kernels.plan import Segment
from sakiyomi.sampling import Sampler
from sakiyomi.tree import Draft, DraftKind

if TYPE_CHECKING:
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
        self.passes = 0
        self._confidence = Confidence(1.0)  # not asked: a chain has one candidate a place

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the passes so far."""
        return self.model.forward_seconds

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass a depth."""
        readings = [self._begin(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]
        active = [reading for reading in readings if self._has_room(reading)]
        while active:
            logits = self.model.score([_segment(reading) for reading in active])
            self.passes += 1
            for i, reading in enumerate(active):
                reading.advance(reading.fresh or [-1], logits[i : i + 1])
            active = [reading for reading in active if reading.fresh]
        return [reading.draft() for reading in readings]

    def _begin(self, context: Context, gamma: int) -> Reading:
        sampler = context.memory.get(self.name)
        if sampler is None:
            sampler = context.memory[self.name] = Sampler(context.params, self.model.vocab_size)
        # The last drafted token is never read, so that gamma columns do: of the last committed one and the others.
        depth = min(gamma, self.model.max_context - len(context.tokens))
        drawn = context.rule == "ratio"
        return Reading(context, sampler, self.name, Growth(depth, depth), Chain(), self._confidence, drawn)

    def _has_room(self, reading: Reading) -> bool:
        context, depth = reading.context, reading.growth.depth
        if depth < 1:
            return False
        try:
            self.model.cache.reserve(context.slot, len(context.tokens) - 1 + depth)
        except MemoryLimitError:
            return False
        return True


def _segment(reading: Reading) -> Segment:
    """The row of the last token, behind all before it."""
    tokens, drafted = reading.context.tokens, reading.growth.tokens
    last = drafted[-1] if drafted else tokens[-1]
    return Segment(reading.context.slot, len(tokens) - 1 + len(drafted), [last])
