"""Drafts with a block drafter: one pass of a few layers guesses a block of tokens, from the target's hidden states.

DFlash (arXiv 2602.06036), and with options DFlash2, DSpark (2607.05147) and JetSpec (2606.18394). The drafter's
cache holds keys and values of committed tokens, computed from the target's hidden states. The rows of a block are
written behind them and overwritten in the next round. The first row of a block is the last committed token, whose
hidden state is not available yet; the others are masks. All rows of a block attend to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sakiyomi.core.embedded import folder_of
from sakiyomi.drafters.base import Context, DrafterContext, HiddenStates
from sakiyomi.drafters.beside import fewer_bits
from sakiyomi.drafters.block_heads.formats import read_block
from sakiyomi.drafters.block_heads.module import make_block
from sakiyomi.drafters.block_heads.runner import BlockRunner, Written
from sakiyomi.drafters.draft_tree_state import TreePlan
from sakiyomi.drafters.model import LONG
from sakiyomi.drafters.seats import Seat, SeatDrafter
from sakiyomi.drafters.slot_tree import OnePassDrafter, Slots, SlotTree
from sakiyomi.model_executor.loading.model import Loaded

AHEAD = 1024  # positions that the kernels are ready for behind a text


@dataclass(eq=False, slots=True)
class _Seat(Seat):
    """A request's slot in the drafter's cache.

    Attributes:
        begun: the first token whose keys and values were written.
        known: the first token behind those; its column would be the next.
        waiting: those of them that are written before the next block, with those of other requests.
    """

    begun: int = 0
    known: int = 0
    waiting: list[Written] = field(default_factory=list)


class BlockDrafter(SeatDrafter[_Seat], OnePassDrafter):
    """Drafts a tree or a chain with a block drafter, for all requests in one pass.

    Args:
        runner: the drafter beside the target.
        vocab_size: of the target.
    """

    name = "block"
    prefill_seconds = 0.0
    seat_type = _Seat

    def __init__(self, runner: BlockRunner, vocab_size: int) -> None:
        super().__init__(runner, Slots(runner.options.guesses))
        self.runner, self.model, self._vocab_size = runner, runner.model, vocab_size
        self.hidden_states = HiddenStates(runner.options.layers, "all")
        self.around, self.ahead = runner.around, runner.options.size

    @classmethod
    def make(cls, argument: str, around: DrafterContext) -> BlockDrafter:
        """The drafter in a folder.

        Raises:
            LoadError, UnsupportedError: it cannot be read, or belongs to another model.
        """
        folder, target = folder_of(argument), around.packed
        file = read_block(folder, int(target.config.num_hidden_layers), allow_pickle=around.allow_pickle)
        target.capture(file.options.layers)
        loaded = Loaded(make_block(file, target), None, argument, folder, owned=True)
        return cls(BlockRunner(file, target, around.pack(loaded, fewer_bits(target))), target.vocab_size)

    def observe(self, context: Context, first: int, states: Mapping[int, Tensor]) -> None:
        """See ``Drafter.observe``: keys and values of these tokens are written, with those of other requests."""
        seat = self.seat(context)
        if not seat.begun <= first <= seat.known:  # states of the tokens in between are missing
            seat.begun, seat.waiting = first, []
        seat.known = first + len(states[self.runner.options.layers[0]])
        if not self.model.cache.has_room(seat.slot, seat.known - seat.begun):
            seat.begun, seat.waiting = seat.known, []
            return
        # A copy: the next pass may write into the same place.
        both = torch.cat([states[layer] for layer in self.runner.options.layers], -1)
        seat.waiting.append(Written(seat.slot, first - seat.begun, both))
        if seat.known - seat.begun - seat.waiting[0].column > LONG:
            before = self.runner.seconds
            self._write([seat])
            self.prefill_seconds += self.runner.seconds - before

    def _write(self, seats: Sequence[_Seat]) -> None:
        """Write what waits of these requests."""
        parts = [part for seat in seats for part in seat.waiting]
        for seat in seats:
            seat.waiting = []
        if parts:
            self.runner.write(parts)

    # ------------------------------------------------------------ drafts

    @property
    def native(self) -> bool:
        """See ``GrowingDrafter``."""
        alike = type(self) is BlockDrafter and self.model.dtype == self.runner.target_dtype
        return alike and self.around.fed is not None and self.around.able

    def seats(self, contexts: Sequence[Context], most: int) -> list[_Seat | None]:
        """See ``GrowingDrafter``: keys and values of all known tokens are written."""
        found = [self._able(context) for context in contexts]
        self._write([seat for seat in found if seat is not None])
        return found

    def _able(self, context: Context) -> _Seat | None:
        """A request's seat, which has learnt from its last tree; None: nothing can be drafted behind its text."""
        seat: _Seat | None = context.memory.get(self.name)
        # The text is known up to its last token, and there is room for a block behind it.
        if seat is None or seat.begun == seat.known or seat.known != len(context.tokens) - 1:
            return None
        whole = seat.known - seat.begun + self.runner.options.size
        if whole > self.model.max_context or not self.model.cache.has_room(seat.slot, whole):
            return None
        return _Seat.of(context, self.name, self._vocab_size)

    def plan(self, context: Context, gamma: int) -> TreePlan | None:
        """See ``GrowingDrafter``."""
        whole = len(context.tokens) + self.runner.options.size
        self._reach(whole)
        return super().plan(context, gamma) if whole <= self.model.max_context else None

    def tree(self, context: Context, seat: _Seat) -> SlotTree:
        """See ``GrowingDrafter``."""
        tree = self._slots.begin(context, self.name, seat.sampler, 1)
        tree.slot, tree.held, tree.lead = seat.slot, seat.known, seat.begun
        return tree

    def place(self, context: Context) -> tuple[int | None, int]:
        """See ``GrowingDrafter``: a block is overwritten by the next one."""
        seat: _Seat | None = context.memory.get(self.name)
        return (None, 0) if seat is None else (seat.slot, seat.known - seat.begun)

    def rows(self, depth: int, missing: int) -> int:
        """See ``GrowingDrafter``."""
        return self.runner.options.size

    def follow(self, context: Context, seat: _Seat, held: int) -> None:
        """See ``GrowingDrafter``."""
        seat.known = held - 1
        self._reach(held + AHEAD)

    def _reach(self, positions: int) -> None:
        """Have the kernels be ready for so many positions."""
        masks = self.around.masks
        if masks is not None and masks.pairs is not None:
            masks.pairs.reach(positions)

    def leave(self, context: Context, seat: _Seat, heard: Tensor) -> None:
        """See ``GrowingDrafter``: what was heard is not written yet."""
        if len(heard):
            seat.waiting = [Written(seat.slot, seat.known - seat.begun - len(heard), heard)]

    def _begin(self, context: Context, gamma: int) -> SlotTree | None:
        seat = self._able(context)
        if seat is None:
            return None
        seat.tree = tree = self._slots.begin(context, self.name, seat.sampler, gamma)
        tree.slot, tree.held, tree.lead = seat.slot, seat.known, seat.begun
        return tree

    def _grow(self, states: Sequence[SlotTree]) -> None:
        """The blocks of all requests are one pass."""
        self._write([tree.context.memory[self.name] for tree in states])
        texts = [(tree.slot, tree.held - tree.lead, tree.context.tokens[-1]) for tree in states]
        logits, hidden = self.runner.guess(texts, max(tree.candidates.depth for tree in states))
        for row, tree in enumerate(states):
            self._grow_one(tree, logits[row], hidden[row], texts[row][2])

    def _grow_one(self, tree: SlotTree, logits: Tensor, hidden: Tensor, token: int) -> None:
        runner, candidates = self.runner, tree.candidates
        if runner.corrections is None:
            tree.grow(runner.over_target(logits))
            return

        def slot(level: int, places: Sequence[int]) -> tuple[Tensor, Sequence[float] | None]:
            before = [token if place < 0 else candidates.tokens[place] for place in places]
            found, sure = correct(level, places, torch.tensor(before, device=hidden.device), candidates.parents)
            return runner.over_target(found), sure

        with runner.correcting(len(logits)):
            correct = runner.corrections.begin(logits, hidden)
            tree.grow_by(slot)
