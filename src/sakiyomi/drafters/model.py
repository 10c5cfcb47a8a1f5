"""A small language model reads ahead: raw passes on a cache of its own, which lives as long as the request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sakiyomi.cache.prefix import LEAST, alike
from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.tree import Draft
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.levels import LevelDrafter
from sakiyomi.drafters.reading import DraftTreeState
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.sampling.sampler import Sampler

if TYPE_CHECKING:
    from sakiyomi.cache.cross_attention import Source
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["ModelDrafter"]

LONG = 64  # tokens from which on catching up is a prompt's work, in chunks, without logits of every row
CHUNK = 512


@dataclass(eq=False, slots=True)
class _Seat:
    """A request's place in the draft's cache.

    Attributes:
        held: committed tokens whose keys and values lie there.
        sure: so many of those were compared with the committed tokens before.
        reading: the tree that was read last; its rows lie behind what is held.
        ready: whether the draft can go on from there this round.
        source: what the request's rows attend to beside their own text.
    """

    slot: int
    held: list[int]
    sampler: Sampler
    sure: int = 0
    reading: DraftTreeState | None = None
    ready: bool = False
    source: Source | None = None


class ModelDrafter(LevelDrafter):
    """Drafts a tree, or a chain, with a small causal LM: a level a pass, all requests at once; see ``TreeReader``.

    Args:
        model: the draft.
        vocab_size: of the target; the draft's may be padded differently.
        name: names the source in traces.
    """

    prefill_seconds = 0.0

    def __init__(self, model: ModelRunner, vocab_size: int, name: str = "model") -> None:
        super().__init__(model, vocab_size)
        self.name = name
        self._vocab_size = vocab_size
        self._seats: dict[int, _Seat] = {}

    def inherit(self, context: Context, earlier: Context) -> None:
        """Take the place of an earlier request of the same conversation over, with the tokens that it holds."""
        seat: _Seat | None = earlier.memory.pop(self.name, None)
        if seat is not None:
            self._sit(context, _Seat(seat.slot, seat.held, self._sampler(context), source=context.source))

    def end(self, context: Context) -> None:
        """Free the request's place."""
        seat = context.memory.pop(self.name, None)
        if seat is not None:
            del self._seats[seat.slot]
            self.model.cache.release(seat.slot)

    def rewind(self, context: Context, length: int) -> None:
        """Say that tokens from this place on may be others than in the last proposal; without that they only grow."""
        seat: _Seat | None = context.memory.get(self.name)
        if seat is not None:
            seat.sure = max(0, min(seat.sure, length, len(context.tokens) - 1))

    def move(self, source: Context, destination: Context, length: int) -> None:
        """Take a request's place to another context, whose first ``length`` tokens are the same."""
        seat: _Seat | None = source.memory.pop(self.name, None)
        if seat is not None:
            sampler = self._sampler(destination)
            self._sit(destination, _Seat(seat.slot, seat.held, sampler, seat.sure, source=destination.source))
            self.rewind(destination, length)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass a level."""
        # The draft's own context may be shorter than the target's: where it ends, it proposes nothing more.
        self._follow([context for context in contexts if len(context.tokens) < self.model.max_context])
        return super().propose(contexts, gammas)

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        seat: _Seat | None = context.memory.get(self.name)
        if seat is None or not seat.ready:
            return None
        return self.levels.begin(context, seat.sampler, self.name, gamma, seat.slot, len(seat.held))

    def _done(self, reading: DraftTreeState) -> None:
        if reading.growth.levels:
            seat: _Seat = reading.context.memory[self.name]
            seat.held.extend(reading.context.tokens[len(seat.held) :])
            seat.reading = reading

    # ------------------------------------------------------------ following the text

    def _sampler(self, context: Context) -> Sampler:
        return Sampler(context.params, self._vocab_size)

    def _follow(self, contexts: Sequence[Context]) -> None:
        """Bring requests' places up to date, a chunk of each at most.

        New prompts share their passes: one of its own for each would keep all the others waiting.
        """
        before = self.model.forward_seconds
        here: list[tuple[Context, _Seat]] = []
        behind: list[tuple[_Seat, list[int]]] = []
        for context in contexts:
            seat = self._seat(context)
            if not seat.held and not self._reserve(seat, 1):  # the source is read here, at the prompt's expense
                continue
            if len(context.tokens) - len(seat.held) > (LONG if seat.held else 1):
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

    def _seat(self, context: Context) -> _Seat:
        """The request's place: of what was read ahead it keeps what was accepted."""
        seat: _Seat | None = context.memory.get(self.name)
        if seat is None:
            seat = _Seat(self.model.cache.take(), [], self._sampler(context), source=context.source)
            self._sit(context, seat)
            if context.shares and context.source is None:
                self._copy(seat, context.tokens[:-1])  # the logits of the last one are wanted
        held, tokens = seat.held, context.tokens
        right = seat.sure
        while right < len(held) and right < len(tokens) - 1 and held[right] == tokens[right]:
            right += 1
        if right == len(held) and seat.reading is not None:
            self._keep(seat, seat.reading, tokens)
            right = len(held)
        del held[right:]
        seat.sure, seat.reading, seat.ready = right, None, False
        return seat

    def _sit(self, context: Context, seat: _Seat) -> None:
        self._seats[seat.slot] = context.memory[self.name] = seat

    def _copy(self, seat: _Seat, tokens: list[int]) -> None:
        """Take what another request's place holds of a new one's tokens."""
        count, other = max((alike(other.held, tokens), slot) for slot, other in self._seats.items())
        if count >= LEAST:
            try:
                self.model.cache.fork(seat.slot, other, 0, count)
            except MemoryLimitError:
                return
            seat.held, seat.sure = tokens[:count], count

    def _keep(self, seat: _Seat, reading: DraftTreeState, tokens: Sequence[int]) -> None:
        """Keep the rows of the path that was accepted, and learn from what the target chose at every place of it."""
        first = len(seat.held)
        path = reading.settle(tokens)
        self.model.cache.keep(seat.slot, first, path)
        seat.held.extend(tokens[first : first + len(path)])

    def _knows(self, tokens: Sequence[int]) -> bool:
        """Whether the draft has these tokens: the target's vocabulary may be padded further than its own."""
        return self.model.vocab_size >= self._vocab_size or max(tokens) < self.model.vocab_size

    def _reserve(self, seat: _Seat, columns: int) -> bool:
        """Room for more tokens. Without the memory for it, or for its source, the request goes on undrafted."""
        if not self.model.takes(seat.source):
            return False
        try:
            self.model.make_room(seat.slot, len(seat.held) + columns, seat.source)
        except MemoryLimitError:
            return False
        return True
