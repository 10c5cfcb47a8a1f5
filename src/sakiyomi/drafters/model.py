"""Drafts with a small language model that has a cache of its own, with a slot for each request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sakiyomi.cache.cross_attention import Source
from sakiyomi.cache.prefix import LEAST, alike
from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.tree import Draft
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.draft_tree_state import DraftTreeState
from sakiyomi.drafters.learning import MOST, HeadLearner
from sakiyomi.drafters.slot_tree import MASKS, ParallelReader
from sakiyomi.drafters.tree_reader import TreeDrafter, TreeReader
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.kernel_rounds import Around, MaskRows
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.sampler import Sampler

LONG = 64  # more missing tokens are read like a prompt: in chunks, without logits of every row
CHUNK = 512


@dataclass(eq=False, slots=True)
class Seat:
    """A request's slot in the draft model's cache.

    Attributes:
        held: committed tokens whose keys and values are there.
        sure: number of these, from the first on, that are known to equal the request's.
        tree: the tree that was grown last; its rows are behind the held tokens.
        ready: whether the draft model can propose this round.
        source: what the request's rows attend to beside their own text.
        began: place of the first token that the target has written.
    """

    slot: int
    held: list[int]
    sampler: Sampler
    sure: int = 0
    tree: DraftTreeState | None = None
    ready: bool = False
    source: Source | None = None
    began: int = 0


class ModelDrafter(TreeDrafter):
    """Drafts a tree or a chain with a small causal LM, for all requests at once, one pass a level; see ``TreeReader``.

    Args:
        model: the draft.
        vocab_size: of the target; the draft's may be padded differently.
        name: names the source in traces.
        mask: token of a model that guesses several tokens a pass, see ``ParallelReader``; None: it guesses one.
        learner: learns from texts that are over; None: the draft stays as it is.
    """

    prefill_seconds = 0.0

    def __init__(
        self,
        model: ModelRunner,
        vocab_size: int,
        name: str = "model",
        mask: int | None = None,
        learner: HeadLearner | None = None,
    ) -> None:
        super().__init__(TreeReader(model, vocab_size) if mask is None else ParallelReader(model, vocab_size, mask))
        self.around, self.ahead = (
            Around(masks=None if mask is None else MaskRows(mask)),
            MASKS if mask is not None else 0,
        )
        self.learner, self.name = learner, name
        self._vocab_size = vocab_size
        self._knows_all = model.vocab_size >= vocab_size  # the target's vocabulary may be padded further
        self._seats: dict[int, Seat] = {}

    def inherit(self, context: Context, earlier: Context) -> None:
        """See ``Drafter.inherit``: the request takes over the slot with the tokens that it holds."""
        self._learn(earlier)
        seat: Seat | None = earlier.memory.pop(self.name, None)
        if seat is not None:
            began = len(context.tokens)
            self._sit(context, Seat(seat.slot, seat.held, self._sampler(context), source=context.source, began=began))

    def end(self, context: Context) -> None:
        """Learn from the request's text, and free its slot."""
        try:
            self._learn(context)
        finally:
            seat = context.memory.pop(self.name, None)
            if seat is not None:
                del self._seats[seat.slot]
                self.model.cache.release(seat.slot)
        if seat is not None and self.learner is not None:
            self.learner.save(idle=not self._seats)

    def rewind(self, context: Context, length: int) -> None:
        """Declare that tokens from this position on may have changed since the last proposal."""
        seat: Seat | None = context.memory.get(self.name)
        if seat is not None:
            seat.sure = max(0, min(seat.sure, length, len(context.tokens) - 1))

    def move(self, source: Context, destination: Context, length: int) -> None:
        """Give a request's slot to another context, whose first ``length`` tokens are the same."""
        seat: Seat | None = source.memory.pop(self.name, None)
        if seat is not None:
            sampler = self._sampler(destination)
            self._sit(
                destination, Seat(seat.slot, seat.held, sampler, seat.sure, source=destination.source, began=seat.began)
            )
            self.rewind(destination, length)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass a level."""
        # The draft model's context may be shorter than the target's. Nothing is proposed behind its end.
        self._follow([context for context in contexts if len(context.tokens) < self.model.max_context])
        return super().propose(contexts, gammas)

    @property
    def native(self) -> bool:
        """See ``GrowingDrafter``: of any text."""
        return self._knows_all and type(self) is ModelDrafter

    def seats(self, contexts: Sequence[Context], most: int) -> list[Seat | None]:
        """See ``GrowingDrafter``."""
        able = [context for context in contexts if len(context.tokens) < self.model.max_context]
        self._follow(able, most)
        found = (context.memory.get(self.name) if context in able else None for context in contexts)
        return [seat if seat is not None and seat.ready else None for seat in found]

    def place(self, context: Context) -> tuple[int | None, int]:
        """See ``GrowingDrafter``."""
        seat: Seat | None = context.memory.get(self.name)
        return (None, 0) if seat is None or seat.tree is not None else (seat.slot, len(seat.held))

    def tree(self, context: Context, seat: Seat) -> DraftTreeState:
        """See ``GrowingDrafter``."""
        state = self.reader.begin(context, seat.sampler, self.name, 1, seat.slot, len(seat.held))
        assert state is not None
        return state

    def follow(self, context: Context, seat: Seat, held: int) -> None:
        """See ``GrowingDrafter``."""
        seat.held += context.tokens[len(seat.held) : held]
        seat.sure = len(seat.held)

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        seat: Seat | None = context.memory.get(self.name)
        if seat is None or not seat.ready:
            return None
        return self.reader.begin(context, seat.sampler, self.name, gamma, seat.slot, len(seat.held))

    def _done(self, state: DraftTreeState) -> None:
        if state.candidates.levels:
            seat: Seat = state.context.memory[self.name]
            seat.held.extend(state.context.tokens[len(seat.held) :])
            seat.tree = state

    # ------------------------------------------------------------ following the text

    def _sampler(self, context: Context) -> Sampler:
        return Sampler(context.params, self._vocab_size)

    def _follow(self, contexts: Sequence[Context], most: int | None = None) -> None:
        """Read what slots lack that lack more than so many tokens, a chunk of each at most; prompts share passes."""
        before, most = self.model.forward_seconds, LONG if most is None else min(most, LONG)
        here: list[tuple[Context, Seat]] = []
        behind: list[tuple[Seat, list[int]]] = []
        for context in contexts:
            seat = self._seat(context)
            if not seat.held and not self._reserve(seat, 1):  # reads the source, which counts as prefill
                continue
            if len(context.tokens) - len(seat.held) > (most if seat.held else 1):
                fresh = context.tokens[len(seat.held) : min(len(seat.held) + CHUNK, len(context.tokens) - 1)]
                if not self._knows(fresh) or not self._reserve(seat, len(fresh)):
                    continue
                behind.append((seat, fresh))
            here.append((context, seat))
        while behind:
            ends = itertools.accumulate(len(fresh) for _, fresh in behind)
            count = max(1, sum(end <= CHUNK for end in ends))
            segments = [SequenceRows(seat.slot, len(seat.held), fresh, prompt=True) for seat, fresh in behind[:count]]
            self.model.score(segments, last=True)
            for seat, fresh in behind[:count]:
                seat.held.extend(fresh)
            del behind[:count]
        self.prefill_seconds += self.model.forward_seconds - before
        for context, seat in here:
            missing = context.tokens[len(seat.held) :]
            seat.ready = len(missing) <= LONG and self._knows(missing)

    def _seat(self, context: Context) -> Seat:
        """The request's slot, rolled back to the tokens that were accepted."""
        seat: Seat | None = context.memory.get(self.name)
        if seat is None:
            slot, began = self.model.cache.take(), len(context.tokens) - 1
            seat = Seat(slot, [], self._sampler(context), source=context.source, began=began)
            self._sit(context, seat)
            if context.shares and context.source is None:
                self._copy(seat, context.tokens[:-1])  # the logits behind the last one are needed
        held, tokens = seat.held, context.tokens
        right = seat.sure
        while right < len(held) and right < len(tokens) - 1 and held[right] == tokens[right]:
            right += 1
        if right == len(held) and seat.tree is not None:
            self._keep(seat, seat.tree, tokens)
            right = len(held)
        right = self.model.cache.resume(seat.slot, right)
        del held[right:]
        seat.sure, seat.tree, seat.ready = right, None, False
        return seat

    def _learn(self, context: Context) -> None:
        """Learn from the tokens that the target has generated in a request, as far as the draft has read them."""
        if self.learner is None or self.name not in context.memory:
            return
        seat = self._seat(context)
        tokens, first = context.tokens[: len(seat.held) + 1], seat.began
        if len(tokens) <= first:
            return
        if not self.model.cache.has_room(seat.slot, len(tokens)):
            return
        held = self.model.cache.resume(seat.slot, max(first, len(tokens) - MOST) - 1)
        self.learner.learn(seat.slot, tokens, first, held)
        seat.held, seat.sure = tokens[:-1], len(tokens) - 1

    def _sit(self, context: Context, seat: Seat) -> None:
        self._seats[seat.slot] = context.memory[self.name] = seat

    def _copy(self, seat: Seat, tokens: list[int]) -> None:
        """Copy what another request's slot holds of a new one's tokens."""
        count, other = max((alike(other.held, tokens), slot) for slot, other in self._seats.items())
        count = self.model.cache.resumable(other, count)
        if count >= LEAST:
            try:
                self.model.cache.fork(seat.slot, other, 0, count)
            except MemoryLimitError:
                return
            seat.held, seat.sure = tokens[:count], count

    def _keep(self, seat: Seat, state: DraftTreeState, tokens: Sequence[int]) -> None:
        """Keep the rows of the accepted path, and learn from what the target chose at every node of it."""
        first = len(seat.held)
        path = state.learn(tokens)
        self.model.cache.commit(seat.slot, first, path)
        seat.held.extend(tokens[first : first + len(path)])

    def _knows(self, tokens: Sequence[int]) -> bool:
        """Whether the draft model has these tokens."""
        return self._knows_all or max(tokens) < self.model.vocab_size

    def _reserve(self, seat: Seat, columns: int) -> bool:
        """Make room for more tokens; False if there is no memory for them or for the source."""
        if not self.model.takes(seat.source):
            return False
        try:
            self.model.make_room(seat.slot, len(seat.held) + columns, seat.source)
        except MemoryLimitError:
            return False
        return True
