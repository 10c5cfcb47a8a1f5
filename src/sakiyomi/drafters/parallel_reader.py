"""Trees of draft models that guess several tokens in one pass, at masks behind the text.

PARD (arXiv 2504.18583): a model trained for it reads the missing tokens and some masks. The last token gives the first
guess, the first mask the second, and so on. Masks leave nothing in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import DraftKind
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.draft_tree_state import DraftTreeState
from sakiyomi.drafters.head_model import over_vocabulary
from sakiyomi.drafters.slot_tree import Slots, SlotTree
from sakiyomi.drafters.tree_reader import TreeReader
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.sampler import Sampler

__all__ = ["MOST", "ParallelReader"]

MOST = 16
"""Most tokens of a pass; published drafts were trained for 8."""


class ParallelReader(TreeReader):
    """Grows trees and chains from one pass each.

    Args:
        model: the draft model.
        vocab_size: of the target.
        mask: token that stands for one to be guessed.
    """

    one_pass = True

    def __init__(self, model: ModelRunner, vocab_size: int, mask: int) -> None:
        super().__init__(model, vocab_size)
        self._mask, self._slots = mask, Slots(MOST)

    def kind_for(self, params: SamplingParams) -> DraftKind:
        """See ``Slots.kind_for``."""
        return self._slots.kind_for(params)

    def begin(
        self, context: Context, sampler: Sampler, name: str, gamma: int, slot: int, held: int
    ) -> DraftTreeState | None:
        """See ``TreeReader.begin``."""
        room = self.model.max_context - len(context.tokens)
        if room < 1:
            return None
        tree = self._slots.begin(context, name, sampler, min(gamma, room))
        tree.candidates.depth = min(tree.candidates.depth, room)
        tree.slot, tree.held = slot, held
        return tree

    def read(self, states: Sequence[DraftTreeState]) -> None:
        """See ``TreeReader.read``: afterwards the cache holds all committed tokens."""
        trees = [state for state in states if isinstance(state, SlotTree) and self._has_room(state)]
        if not trees:
            return
        rows = [tree.segment() for tree in trees]
        segments = [
            replace(part, tokens=[*part.tokens, *[self._mask] * (tree.candidates.depth - 1)])
            for tree, part in zip(trees, rows, strict=True)
        ]
        logits = over_vocabulary(self._score(trees, segments), None, self._vocab_size)
        self.passes += 1
        for tree, own in zip(trees, logits.split([len(segment.tokens) for segment in segments]), strict=True):
            tree.grow(own[-tree.candidates.depth :])
