"""Drafts with Medusa heads: one small pass on the target's last hidden state proposes several tokens at once.

Cai et al. 2024, arXiv 2401.10774. The hidden state is that of the last token that the target has processed. It comes
from the pass that verified the last draft, so that the target runs no extra pass. Head k proposes the token k + 1
positions after the one that the target has chosen there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context, Drafter, HiddenStates
from sakiyomi.drafters.confidence import RANKS, Confidence
from sakiyomi.drafters.draft_tree_state import DraftTreeState, RequestMemory
from sakiyomi.drafters.medusa_heads.formats import read_heads
from sakiyomi.drafters.medusa_heads.runner import MedusaRunner
from sakiyomi.drafters.medusa_heads.tuned import Tuned, read_tuned
from sakiyomi.drafters.tree_reader import SHARPNESS, begin_tree, is_drawn, kind_of
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["MedusaDrafter"]

logger = logging.getLogger("sakiyomi")
_Found = tuple[list[int], list[float | None], list[float]]


@dataclass(eq=False)
class _Guesses(DraftTreeState):
    """The tree of one request: the candidates of a place depend on its level, not on the path to it."""

    def begin(self, levels: Sequence[Confidence], width: int) -> None:
        """Set the confidence of each head, and how many of its first guesses are considered."""
        self._levels, self._width = levels, width
        self._known: dict[int, _Found] = {}

    def confidence_at(self, level: int) -> Confidence:
        """See ``DraftTreeState.confidence_at``."""
        return self._levels[level]

    def candidate_count(self, place: int) -> int:
        """See ``DraftTreeState.candidate_count``."""
        count = super().candidate_count(place)
        return min(count, self._width) if self.builder.picks else count

    def grow(self, logits: Tensor) -> Draft:
        """The draft, from the logits of all heads, (heads, V)."""
        places = [-1]
        for row in logits[: self.candidates.depth]:
            self.rows += [place for place in places if place >= 0]
            self.advance(places, row.expand(len(places), -1))
            places = self.unread
            if not places:
                break
        return self.draft()

    def _ranked(self, places: Sequence[int], logits: Tensor) -> Sequence[None]:
        return [None] * len(places)

    def _candidates(self, place: int, logits: Tensor, count: int, position: int) -> _Found:
        if self.drawn or self.sampler.edits:
            return super()._candidates(place, logits, count, position)
        level = self.candidates.levels
        found = self._known.get(level)
        if found is None or len(found[0]) < count:
            found = self._known[level] = super()._candidates(place, logits, max(count, self._width), position)
        tokens, probs, scores = found
        return tokens[:count], probs[:count], scores[:count]


class MedusaDrafter(Drafter):
    """Drafts a tree or a chain with Medusa heads.

    Args:
        guesser: the heads beside the target.
        vocab_size: of the target.
        tuned: sizes tuned for this machine; None: as many heads and guesses as pay, by the measured costs alone.
    """

    name = "medusa"
    kind: DraftKind = "chain"
    runs_model = prefers_coupled = True
    hidden_states = HiddenStates((HEAD,))

    def __init__(self, guesser: MedusaRunner, vocab_size: int, tuned: Tuned | None = None) -> None:
        if tuned is not None and len(tuned.accuracies) != guesser.heads:
            said = "tuned.json is for %d heads, but there are %d: it is not used; run sakiyomi tune medusa again"
            logger.warning(said, len(tuned.accuracies), guesser.heads)
            tuned = None
        self.guesser, self.tuned = guesser, tuned
        self._vocab_size = vocab_size
        ranks = tuned.accuracies if tuned is not None else [RANKS] * guesser.heads
        self.confidence = {
            rule: [Confidence(sharpness, level[: len(RANKS)]) for level in ranks]
            for rule, sharpness in SHARPNESS.items()
        }

    @classmethod
    def load(cls, name: str, target: ModelRunner, *, allow_pickle: bool = False) -> MedusaDrafter:
        """Heads of a folder, or embedded ones, at the size that was tuned for them, if any was.

        Raises:
            LoadError, UnsupportedError: they cannot be read, or belong to another model.
        """
        folder = folder_of(name)
        guesser = MedusaRunner(read_heads(folder, allow_pickle=allow_pickle).heads, target, name)
        return cls(guesser, target.vocab_size, read_tuned(folder))

    def kind_for(self, params: SamplingParams) -> DraftKind:
        """See ``tree_reader.kind_of``."""
        if (levels := max(map(len, params.choices), default=0)) > self.guesser.heads:
            raise InputError(f"tree has {levels} levels, and these heads guess {self.guesser.heads} tokens")
        return kind_of(params)

    @property
    def passes(self) -> int:
        """See ``Drafter.passes``; one a round."""
        return self.guesser.passes

    @property
    def forward_seconds(self) -> float:
        """See ``Drafter.forward_seconds``."""
        return self.guesser.seconds

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; the heads of all requests are one pass."""
        if not all(context.states for context in contexts):
            raise ValueError("the target gives no hidden states")
        logits = self.guesser(torch.stack([context.states[HEAD] for context in contexts]))
        return [
            self._guesses(context, gamma).grow(logits[:, row])
            for row, (context, gamma) in enumerate(zip(contexts, gammas, strict=True))
        ]

    def _guesses(self, context: Context, gamma: int) -> _Guesses:
        memory = RequestMemory.of(context, self.name, self._vocab_size)
        worth, drawn = context.worth, is_drawn(context)
        depth, nodes, width = min(gamma, self.guesser.heads), context.nodes, len(RANKS)
        if worth is not None:  # the size is a matter of what pays
            depth = min(self.guesser.heads if not drawn else depth, worth.depth)
            if self.tuned is not None:
                depth, nodes = min(depth, self.tuned.heads), min(nodes, self.tuned.nodes)
                width = self.tuned.top_k
        levels = self.confidence[context.rule]
        candidates, builder = begin_tree(context, depth, nodes, lambda: [level.ranks for level in levels[:depth]])
        guesses = _Guesses(context, memory.sampler, self.name, candidates, builder, levels[0], drawn, context.slot, 0)
        guesses.begin(levels, width)
        memory.tree = guesses
        return guesses
