"""Drafts with a Gemma 4 assistant: a few layers with queries only, which attend to the target's keys and values.

Each row reads the target's embedding of a token and the hidden state before it. For the last committed token that is
the target's hidden state, for drafted tokens the assistant's own. All rows of a round have the position of the last
committed token and attend to the text before it. They do not attend to drafted tokens: the hidden state carries those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sakiyomi.core.embedded import folder_of
from sakiyomi.drafters.assistant_model import AssistantModel
from sakiyomi.drafters.base import Context, DrafterContext, HiddenStates
from sakiyomi.drafters.draft_tree_state import DraftTreeState, RequestMemory
from sakiyomi.drafters.eagle import FedTree
from sakiyomi.drafters.tree_reader import TreeDrafter, TreeReader
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.runner import ModelRunner


class AssistantReader(TreeReader):
    """Grows trees whose rows read hidden states, and attend to the target's cache.

    Args:
        assistant: computes rows.
        target: whose slots the trees belong to.
    """

    state = FedTree

    def __init__(self, assistant: AssistantModel, target: ModelRunner) -> None:
        super().__init__(target, target.vocab_size)
        self._assistant = assistant

    def _score(self, states: Sequence[DraftTreeState], segments: Sequence[SequenceRows]) -> Tensor:
        found = []
        for state, segment in zip(states, segments, strict=True):
            assert isinstance(state, FedTree)
            logits, features = self._assistant(state.slot, state.first - 1, segment.tokens, state.inputs())
            state.keep(features)
            found.append(logits)
        return torch.cat(found)

    def _pass_seconds(self, rows: int) -> float:
        return self.besides  # none of the model's: all that a level takes


class AssistantDrafter(TreeDrafter):
    """Drafts a tree or a chain with an assistant, for one request after the other.

    Args:
        assistant: beside the target.
        target: whose cache it reads.
    """

    name = "assistant"
    hidden_states = HiddenStates((HEAD,))

    def __init__(self, assistant: AssistantModel, target: ModelRunner) -> None:
        super().__init__(AssistantReader(assistant, target))
        self.model = None  # type: ignore[assignment]  # the assistant is no model with passes of its own
        self._assistant, self._vocab_size = assistant, target.vocab_size

    @classmethod
    def make(cls, argument: str, around: DrafterContext) -> AssistantDrafter:
        """The assistant in a folder.

        Raises:
            LoadError, UnsupportedError: it cannot be read, belongs to another model, or the target's cache does not
                hold all keys and values.
        """
        return cls(AssistantModel.load(folder_of(argument), around.packed), around.packed)

    @property
    def forward_seconds(self) -> float:
        """See ``Drafter.forward_seconds``."""
        return self._assistant.seconds

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        memory = RequestMemory.of(context, self.name, self._vocab_size)
        held = len(context.tokens) - 1  # what the target's slot has
        if not context.states or held < 1:
            return None
        tree = self.reader.begin(context, memory.sampler, self.name, gamma, context.slot, held)
        if tree is not None:
            tree.given = context.states[HEAD][None]
        memory.tree = tree
        return tree
