"""Drafts with the target's own first layers: no second model, and no second cache.

The layers' keys and values of committed tokens are in the target's cache already. Those of drafted tokens are written
behind them; the pass that scores the draft overwrites these columns in all layers. The quality of such a draft depends
on the model: few models are trained to predict tokens from their first layers. LayerSkip (Elhoushi et al. 2024, arXiv
2404.16710) trains for it; its section 4.3 describes this way of drafting.
"""

from __future__ import annotations

from sakiyomi.drafters.base import Context, DrafterContext
from sakiyomi.drafters.draft_tree_state import DraftTreeState, RequestMemory
from sakiyomi.drafters.tree_reader import TreeDrafter, TreeReader
from sakiyomi.model_executor.early_exit import FirstLayers


class EarlyExit(TreeDrafter):
    """Drafts a tree or a chain with an early exit from the target, one pass of its first layers for each level.

    Args:
        model: the target's first layers, on the target's cache.
    """

    name = "early-exit"

    def __init__(self, model: FirstLayers) -> None:
        super().__init__(TreeReader(model, model.vocab_size))

    @classmethod
    def make(cls, layers: int, around: DrafterContext) -> EarlyExit:
        """A drafter that runs so many layers.

        Raises:
            InputError, UnsupportedError: see ``FirstLayers``.
        """
        return cls(FirstLayers(around.packed, layers))

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        memory = RequestMemory.of(context, self.name, self.model.vocab_size)
        # The target's cache holds all committed tokens but the last; the draft uses the columns behind them.
        held = len(context.tokens) - 1
        memory.tree = self.reader.begin(context, memory.sampler, self.name, gamma, context.slot, held)
        return memory.tree
