"""Drafts with an EAGLE head: one decoder layer, which reads the target's hidden states beside the tokens.

Li et al. 2024 and 2025: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840). A row of the head is a
token and the feature of the token before it. The features of committed tokens come from the target, those of drafted
tokens from the head's own output. A drafted token is therefore read again with the target's feature once it is
committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.tree import Draft
from sakiyomi.drafters.base import Context, DrafterContext, HiddenStates
from sakiyomi.drafters.beside import fewer_bits
from sakiyomi.drafters.draft_tree_state import DraftTreeState
from sakiyomi.drafters.eagle_heads.formats import read_eagle
from sakiyomi.drafters.eagle_heads.module import load_module
from sakiyomi.drafters.eagle_heads.runner import EagleHead, FeatureHead, SharedHead
from sakiyomi.drafters.model import CHUNK, LONG
from sakiyomi.drafters.seats import Seat, SeatDrafter
from sakiyomi.drafters.slot_tree import MASKS, ParallelReader
from sakiyomi.drafters.tree_reader import TreeDrafter, TreeReader
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.loading.model import Loaded

TOGETHER = 64
"""Tokens whose features are made at the latest, all in one product."""


@dataclass(eq=False)
class FedTree(DraftTreeState):
    """A tree whose rows read features beside their tokens, and which grows level by level.

    Attributes:
        features: of candidates that were read, and of the last committed token (-1), by the head.
    """

    features: dict[int, Tensor] = field(default_factory=dict)

    def inputs(self) -> Tensor:
        """Features of the rows of the next pass."""
        if not self.candidates.levels:
            return self.given
        return torch.stack([self.features[self.candidates.parents[place]] for place in self.unread])

    def keep(self, states: Tensor) -> None:
        """Take what the head gave for the rows of the pass."""
        if not self.candidates.levels:
            self.features[-1] = states[-1]
        else:
            self.features.update(zip(self.unread, states, strict=True))


class FedReader(TreeReader):
    """Grows trees whose rows read features, see ``FedTree``."""

    state = FedTree

    def __init__(self, head: FeatureHead, vocab_size: int) -> None:
        super().__init__(head.model, vocab_size, head.around.fed)
        self._head = head

    def _score(self, states: Sequence[DraftTreeState], segments: Sequence[SequenceRows]) -> Tensor:
        inputs = [state.inputs() for state in states if isinstance(state, FedTree)]
        logits, features = self._head.read(segments, torch.cat(inputs))
        for state, own in zip(states, features.split([len(part) for part in inputs]), strict=True):
            assert isinstance(state, FedTree)
            state.keep(own)
        return logits


class ParallelFedReader(ParallelReader):
    """Grows trees of one pass whose rows read features (P-EAGLE, arXiv 2602.01469): those of masks were learnt."""

    def __init__(self, head: EagleHead, vocab_size: int) -> None:
        assert head.options.mask is not None
        super().__init__(head.model, vocab_size, head.options.mask)
        self._head = head

    def _score(self, states: Sequence[DraftTreeState], segments: Sequence[SequenceRows]) -> Tensor:
        inputs: list[Tensor] = []
        for state in states:
            inputs += [state.given, self._head.mask_feature().expand(state.candidates.depth - 1, -1)]
        return self._head.read(segments, torch.cat(inputs))[0]


@dataclass(eq=False, slots=True)
class _Seat(Seat):
    """A request's slot in the head's cache.

    Attributes:
        features: of committed tokens from `begun` on, with room for more, (tokens, hidden).
        begun: the first token whose feature is stored.
        known: the first token behind those.
        held: the first token that has no row in the slot.
        waiting: hidden states of the target for the tokens behind `known`, whose features are not made yet: the first
            of these tokens, and the states by layer.
    """

    features: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    begun: int = 0
    known: int = 0
    held: int = 0
    waiting: list[tuple[int, Mapping[int, Tensor]]] = field(default_factory=list)

    def feed(self, first: int, states: Tensor) -> None:
        """Store the features of the tokens from `first` on; earlier ones stay."""
        if not self.begun < first <= self.known:
            self.begun = self.known = first
            self.held = first + 1
        self.held = min(self.held, first) if first < self.known else self.held
        used, self.known = first - self.begun, first + len(states)
        if self.known - self.begun > len(self.features):
            longer = states.new_empty(2 * (self.known - self.begun), states.shape[1])
            if used:
                longer[:used] = self.features[:used]
            self.features = longer
        self.features[used : used + len(states)] = states

    def between(self, first: int, last: int) -> Tensor:
        """Features of tokens first, ..., last - 1."""
        return self.features[first - self.begun : last - self.begun]


def _end(part: tuple[int, Mapping[int, Tensor]]) -> int:
    """The token behind those whose states wait together."""
    first, states = part
    return first + len(next(iter(states.values())))


class EagleDrafter(SeatDrafter[_Seat], TreeDrafter):
    """Drafts a tree or a chain with an EAGLE head, for all requests at once, one pass a level.

    Args:
        head: beside the target.
        vocab_size: of the target.
    """

    name = "eagle"
    prefill_seconds = 0.0
    seat_type = _Seat

    def __init__(self, head: FeatureHead, vocab_size: int) -> None:
        parallel = isinstance(head, EagleHead) and head.options.mask is not None
        reader: Callable[[Any, int], TreeReader] = ParallelFedReader if parallel else FedReader
        super().__init__(reader(head, vocab_size))
        self.hidden_states = HiddenStates(head.options.layers, "all")
        self._head, self._vocab_size, self.around = head, vocab_size, head.around
        self.ahead = MASKS if parallel else 0

    @classmethod
    def make(cls, argument: str, around: DrafterContext) -> EagleDrafter:
        """The head in a folder.

        Raises:
            LoadError, UnsupportedError: it cannot be read, or belongs to another model.
        """
        folder, target = folder_of(argument), around.packed
        file = read_eagle(folder, int(target.config.num_hidden_layers), allow_pickle=around.allow_pickle)
        if file.options.first:  # it reads the target's last norm
            target.unfold()
        target.capture(file.options.layers)
        module = Loaded(load_module(file, target), None, argument, folder, owned=True)
        model = around.pack(module, None if file.options.first else fewer_bits(target))
        head = SharedHead(target, model) if file.options.first else EagleHead(file, target, model)
        return cls(head, target.vocab_size)

    def observe(self, context: Context, first: int, states: Mapping[int, Tensor]) -> None:
        """See ``Drafter.observe``. Features are made when they are needed, or of many tokens at once."""
        seat = self.seat(context)
        if seat.waiting and first != _end(seat.waiting[-1]):
            self._feed([seat])
        # Copies: the next pass may write into the same place.
        seat.waiting.append((first, {layer: state.clone() for layer, state in states.items()}))
        if _end(seat.waiting[-1]) - seat.waiting[0][0] >= TOGETHER:
            self._feed([seat])

    def _feed(self, seats: Sequence[_Seat]) -> None:
        """Make the features of the tokens that wait for them, of all these requests in one product."""
        waiting = [(seat, *part) for seat in seats for part in seat.waiting]
        if not waiting:
            return
        for seat in seats:
            seat.waiting = []
        states = {layer: torch.cat([own[layer] for *_, own in waiting]) for layer in waiting[0][2]}
        counts = [len(next(iter(own.values()))) for *_, own in waiting]
        for (seat, first, _), features in zip(waiting, self._head.project(states).split(counts), strict=True):
            seat.feed(first, features)

    # ------------------------------------------------------------ drafts

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass a level."""
        self._read(contexts)
        return super().propose(contexts, gammas)

    def _read(self, contexts: Sequence[Context], most: int = LONG) -> None:
        """Make the features of tokens that wait for them, and read what slots lack that lack more than so many."""
        before = self.model.forward_seconds
        self._feed([context.memory[self.name] for context in contexts if self.name in context.memory])
        for context in contexts:
            self._catch_up(context, most)
        self.prefill_seconds += self.model.forward_seconds - before

    @property
    def native(self) -> bool:
        """See ``GrowingDrafter``."""
        kind, own = type(self), EagleDrafter
        alike = (kind.propose, kind._begin, kind._grow) == (own.propose, own._begin, own._grow)
        alike = alike and self._head.model.dtype == self._head.target.dtype
        return alike and self.around.fed is not None and self.around.able

    def seats(self, contexts: Sequence[Context], most: int) -> list[_Seat | None]:
        """See ``GrowingDrafter``."""
        self._read(contexts, most)
        return [self._able(context) for context in contexts]

    def _able(self, context: Context) -> _Seat | None:
        """A request's seat, which has learnt from its last tree; None: nothing can be drafted behind its text."""
        seat: _Seat | None = context.memory.get(self.name)
        count = len(context.tokens)
        # Behind a prefix from the cache, whose features are missing, the features of two tokens are needed.
        if seat is None or seat.known != count - 1 or seat.held >= count or count - seat.held > LONG:
            return None
        if self._blank(seat):  # of a text of two tokens
            return None
        return _Seat.of(context, self.name, self._vocab_size) if count < self.model.max_context else None

    def tree(self, context: Context, seat: _Seat) -> DraftTreeState:
        """See ``GrowingDrafter``."""
        tree = self._begin(context, 1)
        assert tree is not None
        return tree

    def place(self, context: Context) -> tuple[int | None, int]:
        """See ``GrowingDrafter``: rows of trees are not needed, since accepted tokens are read again."""
        seat: _Seat | None = context.memory.get(self.name)
        return (None, 0) if seat is None else (seat.slot, max(0, seat.held - seat.begun - 1))

    def follow(self, context: Context, seat: _Seat, held: int) -> None:
        """See ``GrowingDrafter``."""
        seat.held = held

    def leave(self, context: Context, seat: _Seat, heard: Tensor) -> None:
        """See ``GrowingDrafter``."""
        if len(heard):
            seat.feed(seat.known, heard)

    def _catch_up(self, context: Context, most: int) -> None:
        """Read what the slot lacks of a text that lacks more than ``most`` tokens, without its last ones."""
        if self.name not in context.memory:
            return
        seat = _Seat.of(context, self.name, self._vocab_size)
        most = 1 if self._blank(seat) else most
        while seat.known == len(context.tokens) - 1 and len(context.tokens) - seat.held > most:
            end = min(seat.held + CHUNK, len(context.tokens) - 1)
            columns = end - seat.begun - 1
            if columns >= self.model.max_context or not self.model.cache.has_room(seat.slot, columns):
                return
            start, tokens = seat.held - seat.begun - 1, context.tokens[seat.held : end]
            inputs = seat.between(seat.held - 1, end - 1)
            self._head.read([SequenceRows(seat.slot, start, tokens, prompt=True)], inputs, last=True)
            seat.held = end

    def _blank(self, seat: _Seat) -> bool:
        """Whether the text's first row is not read yet, and has no embedding: the kernels do not know that."""
        return self._head.blank and seat.held == seat.begun + 1

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        seat, count = self._able(context), len(context.tokens)
        if seat is None:
            return None
        tree = self.reader.begin(context, seat.sampler, self.name, gamma, seat.slot, seat.held)
        if tree is not None:
            tree.lead, tree.given = seat.begun + 1, seat.between(seat.held - 1, count - 1)
        return tree

    def _done(self, state: DraftTreeState) -> None:
        if state.candidates.levels:
            seat: _Seat = state.context.memory[self.name]
            seat.held, seat.tree = len(state.context.tokens), state
