"""What rounds in the kernels have of a drafter whose trees grow there: a seat of each request, from round to round."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sakiyomi.drafters.native_texts import LONG
from sakiyomi.drafters.native_trees import TreeSize, seat_tree
from sakiyomi.drafters.tree_reader import GrowingDrafter
from sakiyomi.engine.native_turns import NONE, Turn
from sakiyomi.model_executor.kernel_rounds import Committed, KernelRounds

logger = logging.getLogger("sakiyomi")


class NativeSeats:
    """Seats of an engine's requests.

    Args:
        grower: the drafter.
        rounds: where its trees grow.

    Attributes:
        grower: see above.
    """

    def __init__(self, grower: GrowingDrafter, rounds: KernelRounds) -> None:
        self.grower, self._rounds = grower, rounds
        width, (fed, masks, _) = rounds.models[-1].vocab_size, grower.around
        own = fed.vocab if fed is not None else grower.model.vocab_size if grower.model is not None else 0
        mapped = fed is not None and fed.tokens is not None
        # Options that change the target's rows change those of its drafts, which cover its vocabulary, a row a place.
        self._covers = masks is None and grower.model is not None and own >= width and not mapped

    def fits(self, depths: Sequence[int], *, edited: bool) -> bool:
        """Whether trees of so many levels grow there; ``edited``: their rows are changed by options of a request."""
        if edited and not self._covers:
            return False
        grower, model = self.grower, self.grower.model
        if not grower.one_pass or model is None:
            return True
        return sum([grower.rows(self._levels(depth), 1) for depth in depths if depth]) <= model.sizes[-1]

    def _levels(self, depth: int) -> int:
        """Levels of a tree of which so many are wanted, at most."""
        return depth if self.grower.levels is None else min(depth, self.grower.levels)

    def follow(self, drafting: Sequence[Turn], depth: int) -> None:
        """Have the drafter read what it lacks of these requests' texts, but what fits in one of its passes.

        Not of requests whose trees would not have been worth their time.

        Args:
            drafting: the requests that draft.
            depth: levels that are wanted of their trees, at most.
        """
        grower, rows = self.grower, self._rounds.models[0].sizes[-1]
        more = grower.rows(self._levels(depth), 1) - 1 if grower.one_pass else 0  # beside what it lacks
        missing = sum([turn.length - turn.held + more for turn in drafting if turn.seat is not None])
        share = max(1, rows // max(1, len(drafting)) - more)
        most = LONG if missing <= rows else share
        lacking = []
        for turn in drafting:
            behind = turn.seat is None or turn.length - turn.held > most
            turn.waits = behind and not turn.wishes
            if behind and turn.wishes:
                lacking.append(turn)
        if not lacking:
            return
        for turn in lacking:
            self.hand_back(turn)
        found = grower.seats([turn.context for turn in lacking], min(LONG, share))
        for turn, seat in zip(lacking, found, strict=True):
            turn.slot, turn.seat_room = None, 0
            if seat is not None:
                state = grower.tree(turn.context, seat)
                turn.held = state.held
                if grower.model is not None:
                    turn.slot = state.slot
                turn.stream = turn.context.noise.fork(grower.name) if state.drawn else None
                seat_tree(self._rounds, turn.number, state)
                turn.seat = seat

    def size(self, turn: Turn, gamma: int) -> TreeSize:
        """How large a request's tree may become, of which so many levels are wanted."""
        if not gamma or turn.seat is None or turn.waits:
            return NONE
        context, known, model = turn.context, turn.tree, self.grower.model
        chain, whole = context.params.builder == "chain", model is None or turn.length + gamma <= model.max_context
        if chain and context.worth is None and gamma == known.depth and whole:
            return known  # nothing of a chain changes but its depth
        plan = self.grower.plan(context, gamma)
        if plan is None:
            return NONE
        if chain and plan.tree.depth == known.depth:
            return known
        size = TreeSize.of(plan)
        assert size is not None, "see `judged`"
        turn.tree = size
        return size

    def rows(self, turns: Sequence[Turn]) -> int:
        """Rows of the drafter's largest pass in a round of these requests."""
        grower, growing = self.grower, [turn for turn in turns if turn.size.depth]
        missing = sum([grower.rows(turn.size.depth, turn.length - turn.held) for turn in growing])
        # A level is hardly ever as wide as it may be: one that is wider than the largest pass is Python's matter.
        width = 0 if grower.one_pass else sum([turn.size.width for turn in growing])
        return max(missing, min(width, self._rounds.models[0].sizes[-1]))

    def took(self, turn: Turn, found: Committed, *, over: bool) -> None:
        """Take over what a round has committed of a request; `over`: its text has ended."""
        if turn.size != NONE:
            turn.wishes = found.wishes
        if turn.seat is None:
            return
        if turn.stream is not None:
            turn.stream.counter = found.drawn % 2**64
        if turn.held != found.held:
            turn.held = found.held
            self.grower.follow(turn.context, turn.seat, found.held)
        if found.places and not over:
            self.grower.learn(turn.context, found.places)

    def hand_back(self, turn: Turn) -> None:
        """Give the drafter what a request has heard of the target's passes in the kernels, which it leaves."""
        seat, turn.seat = turn.seat, None
        if seat is None or self.grower.around.heard is None:
            return
        try:
            self.grower.leave(turn.context, seat, self._rounds.heard_by(turn.number, turn.length))
        except Exception as error:  # its next drafts lack what it does not know
            logger.debug("drafter %s lost hidden states: %r", self.grower.name, error)
