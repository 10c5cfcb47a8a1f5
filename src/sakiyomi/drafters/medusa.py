"""Drafts with Medusa heads: one small pass on the target's last hidden state proposes several tokens at once.

Cai et al. 2024, arXiv 2401.10774. The hidden state is that of the last processed token. It comes from the pass that
verified the last draft, so the target runs no extra pass. Head k proposes the token k + 1 positions behind the one that
the target has chosen there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from sakiyomi.core.embedded import folder_of
from sakiyomi.drafters.base import Context, DrafterContext, HiddenStates
from sakiyomi.drafters.draft_tree_state import RequestMemory, TreePlan
from sakiyomi.drafters.medusa_heads.formats import read_heads
from sakiyomi.drafters.medusa_heads.runner import MedusaRunner
from sakiyomi.drafters.medusa_heads.tuned import Tuned, read_tuned
from sakiyomi.drafters.slot_tree import OnePassDrafter, Slots, SlotTree
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.runner import ModelRunner

logger = logging.getLogger("sakiyomi")


class MedusaDrafter(OnePassDrafter):
    """Drafts a tree or a chain with Medusa heads.

    Args:
        guesser: the heads beside the target.
        vocab_size: of the target.
        tuned: sizes tuned for this machine; None: measured costs decide how many heads and guesses are used.
    """

    name = "medusa"
    hidden_states = HiddenStates((HEAD,))

    def __init__(self, guesser: MedusaRunner, vocab_size: int, tuned: Tuned | None = None) -> None:
        if tuned is not None and len(tuned.accuracies) != guesser.heads:
            said = "tuned.json is for %d heads, but there are %d: it is not used; run sakiyomi tune medusa again"
            logger.warning(said, len(tuned.accuracies), guesser.heads)
            tuned = None
        super().__init__(guesser, Slots(guesser.heads, tuned.accuracies if tuned is not None else None))
        self.guesser, self.tuned, self._vocab_size = guesser, tuned, vocab_size
        self.around = guesser.around

    @classmethod
    def load(cls, name: str, target: ModelRunner, *, allow_pickle: bool = False) -> MedusaDrafter:
        """Heads of a folder, or embedded ones, with their tuned size if there is one.

        Raises:
            LoadError, UnsupportedError: they cannot be read, or belong to another model.
        """
        folder = folder_of(name)
        guesser = MedusaRunner(read_heads(folder, allow_pickle=allow_pickle).heads, target, name)
        return cls(guesser, target.vocab_size, read_tuned(folder))

    @classmethod
    def make(cls, argument: str, around: DrafterContext) -> MedusaDrafter:
        """See ``load``."""
        return cls.load(argument, around.packed, allow_pickle=around.allow_pickle)

    @property
    def _most(self) -> tuple[int, int, int] | None:
        """Largest depth, nodes, and candidates of a place that were tuned."""
        return None if self.tuned is None else (self.tuned.heads, self.tuned.nodes, self.tuned.top_k)

    @property
    def native(self) -> bool:
        """See ``GrowingDrafter``: the kernels run the heads."""
        return type(self) is MedusaDrafter and self.around.able

    def plan(self, context: Context, gamma: int) -> TreePlan | None:
        """See ``GrowingDrafter``."""
        return self._slots.plan(context, gamma, self._most)

    def seats(self, contexts: Sequence[Context], most: int) -> list[RequestMemory | None]:
        """See ``GrowingDrafter``."""
        return [self._memory(context) if context.states else None for context in contexts]

    def tree(self, context: Context, seat: RequestMemory) -> SlotTree:
        """See ``GrowingDrafter``."""
        tree = self._slots.begin(context, self.name, seat.sampler, 1, self._most)
        tree.held, tree.given = len(context.tokens) - 1, context.states[HEAD][None]
        return tree

    def leave(self, context: Context, seat: RequestMemory, heard: Tensor) -> None:
        """See ``GrowingDrafter``."""
        if len(heard):
            context.states = {HEAD: heard[-1]}

    def _memory(self, context: Context) -> RequestMemory:
        return RequestMemory.of(context, self.name, self._vocab_size)

    def _begin(self, context: Context, gamma: int) -> SlotTree:
        if not context.states:
            raise ValueError("the target gives no hidden states")
        memory = self._memory(context)
        memory.tree = tree = self._slots.begin(context, self.name, memory.sampler, gamma, self._most)
        return tree

    def _grow(self, states: Sequence[SlotTree]) -> None:
        """The heads of all requests are one pass."""
        logits = self.guesser(torch.stack([state.context.states[HEAD] for state in states]))
        for row, tree in enumerate(states):
            tree.grow(logits[:, row])
