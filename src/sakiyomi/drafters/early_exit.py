"""The target's own first layers read ahead: no second model, and no second cache.

The layers' keys and values of committed tokens lie in the target's cache already. Those of drafted tokens are written
behind them, and the pass that scores the draft overwrites them with the same columns of all layers. How good such a
draft is depends on the model: few are trained to say what they think after half of their layers (LayerSkip, Elhoushi et
al. 2024, arXiv 2404.16710, trains for it; section 4.3 there is this way of drafting).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sakiyomi.drafters.base import Context
from sakiyomi.drafters.levels import LevelDrafter
from sakiyomi.drafters.reading import DraftTreeState, RequestMemory

if TYPE_CHECKING:
    from sakiyomi.model_executor.early_exit import FirstLayers

__all__ = ["EarlyExit"]


class EarlyExit(LevelDrafter):
    """Drafts a tree, or a chain, by an earlier exit from the target: a level a pass of its first layers.

    Args:
        model: the target's first layers, on the target's cache.
    """

    name = "early-exit"

    def __init__(self, model: FirstLayers) -> None:
        super().__init__(model, model.vocab_size)

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        memory = RequestMemory.of(context, self.name, self.model.vocab_size)
        # All committed tokens but the last lie in the target's cache, and that one's columns are the draft's to use.
        held = len(context.tokens) - 1
        memory.tree = self.levels.begin(context, memory.sampler, self.name, gamma, context.slot, held)
        return memory.tree
