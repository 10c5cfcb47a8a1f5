"""A small language model reads ahead: raw passes on a cache of its own, which lives as long as the request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sakiyomi.builders import BUILDERS, Growth
from sakiyomi.clock import running_mean
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.reading import Reading
from sakiyomi.errors import MemoryLimitError
from sakiyomi.kernels.plan import Segment
from sakiyomi.sampling import Sampler
from sakiyomi.tree import Draft, DraftKind

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.cache.sources import Source
    from sakiyomi.model import PackedModel
    from sakiyomi.params import SamplingParams

__all__ = ["ModelDrafter"]

LONG = 64  # tokens from which on catching up is a prompt's work, in chunks, without logits of every row
CHUNK = 512
_FOLLOWED = 0.8  # of the nodes of a level that are accepted so many have a child that is, where the draft is good
# How much surer than the draft's own softmax one may be of its choice, before anything was seen (docs/log.md).
SHARPNESS = {"greedy": 2.0, "coupled": 1.4, "ratio": 1.0}


@dataclass(eq=False, slots=True)
class _Seat:
    """A request's place in the draft's cache.

    Attributes:
        held: committed tokens whose keys and values lie there.
        sure: so many of those were compared with the committed tokens before.
        reading: the tree that was read last; its rows lie behind what is held.
        source: what the request's rows attend to beside their own text.
    """

    slot: int
    held: list[int]
    sampler: Sampler
    sure: int = 0
    reading: Reading | None = None
    source: Source | None = None


class ModelDrafter:
    """Drafts a tree, or a chain, with a small causal LM: a level a pass, all requests at once.

    Under "greedy" candidates are its most probable tokens, under "coupled" the top of log q + the position's noise; of
    a chain or a static tree under "ratio" they are drawn from its distribution after the same warpers as the target's,
    which is kept, and of the other trees, whose nodes are chosen afterwards, they are its most probable tokens.

    Args:
        model: the draft.
        vocab_size: of the target; the draft's may be padded differently.
        name: names the source in traces.
    """

    kind: DraftKind = "chain"

    def __init__(self, model: PackedModel, vocab_size: int, name: str = "model") -> None:
        self.model, self.name = model, name
        self.prefill_seconds = 0.0
        self.passes = 0
        self._besides = 1e-4  # seconds of a level outside the model
        self._vocab_size = vocab_size
        self._confidence = {rule: Confidence(sharpness) for rule, sharpness in SHARPNESS.items()}

    def kind_for(self, params: SamplingParams) -> DraftKind:
        """What is proposed to a request that is sampled by the ratio rule."""
        return {"chain": "chain", "static": "without_replacement"}.get(params.builder, "point_mass")  # type: ignore[return-value]

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the draft's forwards so far, those over prompts included."""
        return self.model.forward_seconds

    def inherit(self, context: Context, earlier: Context) -> None:
        """Take the place of an earlier request of the same conversation over, with the tokens that it holds."""
        seat: _Seat | None = earlier.memory.pop(self.name, None)
        if seat is not None:
            sampler = self._sampler(context)
            context.memory[self.name] = _Seat(seat.slot, seat.held, sampler, source=context.source)

    def end(self, context: Context) -> None:
        """Free the request's place."""
        seat = context.memory.pop(self.name, None)
        if seat is not None:
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
            destination.memory[self.name] = _Seat(
                seat.slot, seat.held, self._sampler(destination), seat.sure, source=destination.source
            )
            self.rewind(destination, length)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass a level."""
        readings: dict[int, Reading] = {}
        for context, gamma in zip(contexts, gammas, strict=True):
            # The draft's own context may be shorter than the target's: where it ends, it proposes nothing more.
            room = self.model.max_context - len(context.tokens)
            if room > 0 and self._follow(context):
                seat: _Seat = context.memory[self.name]
                readings[context.id] = seat.reading = self._begin(context, seat, gamma, room)
        active = list(readings.values())
        began, inside, passes = time.perf_counter(), self.model.forward_seconds, self.passes
        while active:
            active = [reading for reading in active if self._has_room(reading)]
            if not active:
                break
            segments = [self._segment(reading) for reading in active]
            logits = self.model.score(segments)
            self.passes += 1
            row = 0
            for reading, segment in zip(active, segments, strict=True):
                count = len(segment.tokens)
                self._take(reading, logits[row : row + count])
                row += count
            active = [reading for reading in active if reading.fresh]
        if self.passes > passes:
            besides = time.perf_counter() - began - (self.model.forward_seconds - inside)
            self._besides = running_mean(self._besides, besides / (self.passes - passes))
        return [readings[c.id].draft() if c.id in readings else Draft.empty() for c in contexts]

    # ------------------------------------------------------------ following the text

    def _sampler(self, context: Context) -> Sampler:
        return Sampler(context.params, self._vocab_size)

    def _follow(self, context: Context) -> bool:
        """Bring the request's place up to date, a chunk at most; whether the draft can go on from there this round."""
        seat = self._seat(context)
        before = self.model.forward_seconds
        if not seat.held and not self._reserve(seat, 1):  # the source is read here, at the prompt's expense
            return False
        if len(context.tokens) - len(seat.held) > (LONG if seat.held else 1):
            fresh = context.tokens[len(seat.held) : min(len(seat.held) + CHUNK, len(context.tokens) - 1)]
            if not self._knows(fresh) or not self._reserve(seat, len(fresh)):
                return False
            self.model.score([Segment(seat.slot, len(seat.held), fresh, prompt=True)], last=True)
            seat.held.extend(fresh)
        self.prefill_seconds += self.model.forward_seconds - before
        missing = context.tokens[len(seat.held) :]
        return len(missing) <= LONG and self._knows(missing)

    def _seat(self, context: Context) -> _Seat:
        """The request's place: of what was read ahead it keeps what was accepted."""
        seat: _Seat | None = context.memory.get(self.name)
        if seat is None:
            sampler = self._sampler(context)
            seat = context.memory[self.name] = _Seat(self.model.cache.take(), [], sampler, source=context.source)
        held, tokens = seat.held, context.tokens
        right = seat.sure
        while right < len(held) and right < len(tokens) - 1 and held[right] == tokens[right]:
            right += 1
        if right == len(held) and seat.reading is not None:
            self._keep(seat, seat.reading, tokens)
            right = len(held)
        del held[right:]
        seat.sure, seat.reading = right, None
        return seat

    def _keep(self, seat: _Seat, reading: Reading, tokens: Sequence[int]) -> None:
        """Keep the rows of the path that was accepted, and learn from what the target chose at every place of it."""
        rows = {candidate: row for row, candidate in enumerate(reading.rows)}
        first, place = len(seat.held), -1
        path: list[int] = []
        for position in range(first, len(tokens)):
            if place not in reading.listed:
                break
            start, listed, scores = reading.listed[place]
            rank = listed.index(tokens[position]) if tokens[position] in listed else None
            reading.confidence.learn(scores, rank)
            place = start + rank if rank is not None else len(reading.growth.tokens)
            # The last token's logits are wanted: it is read again.
            if place in rows and len(path) == position - first and position < len(tokens) - 1:
                path.append(rows[place])
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

    # ------------------------------------------------------------ reading ahead

    def _begin(self, context: Context, seat: _Seat, gamma: int, room: int) -> Reading:
        name = context.params.builder
        drawn = context.rule == "ratio" and name in ("chain", "static")
        depth = min(gamma if drawn or context.worth is None else context.worth.depth, room)
        growth = Growth(depth, depth if name == "chain" else context.nodes)
        confidence = self._confidence[context.rule]
        builder = BUILDERS[name](confidence.ranks)
        if builder.picks and context.worth is not None:
            # A pass grows by steps: a node may pay that is worth less than its share of the largest one.
            growth.floor = context.worth.price(growth.nodes) / 2
        return Reading(context, seat.sampler, self.name, growth, builder, confidence, drawn)

    def _seat_of(self, reading: Reading) -> _Seat:
        seat: _Seat = reading.context.memory[self.name]
        return seat

    def _has_room(self, reading: Reading) -> bool:
        seat = self._seat_of(reading)
        missing = 0 if reading.growth.levels else len(reading.context.tokens) - len(seat.held)
        return self._reserve(seat, missing + len(reading.rows) + len(reading.fresh))

    def _segment(self, reading: Reading) -> Segment:
        """The rows of a request in the next pass: first the committed tokens that are missing, then a level a pass."""
        seat, growth = self._seat_of(reading), reading.growth
        if not growth.levels:
            return Segment(seat.slot, len(seat.held), reading.context.tokens[len(seat.held) :])
        rows = {candidate: row for row, candidate in enumerate((*reading.rows, *reading.fresh))}
        parents = tuple(rows.get(growth.parents[candidate], -1) for candidate in rows)
        tokens = [growth.tokens[candidate] for candidate in reading.fresh]
        done = len(reading.rows)
        return Segment(seat.slot, len(seat.held) + done, tokens, parents, done=done)

    def _take(self, reading: Reading, logits: Tensor) -> None:
        """Candidates behind the rows of a pass, (rows, V of the draft), and what to read next."""
        seat, growth = self._seat_of(reading), reading.growth
        if not growth.levels:
            # Not before the pass: interrupted, it would leave tokens here whose keys were never written.
            seat.held.extend(reading.context.tokens[len(seat.held) :])
            places, logits = [-1], logits[-1:]
        else:
            places = reading.fresh
            reading.rows.extend(places)
        missing = self._vocab_size - logits.shape[1]
        if missing:  # vocabularies may be padded differently
            logits = F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :missing]
        reading.advance(places, logits)
        if not self._pays(reading, reading.fresh):
            reading.fresh = []

    def _pays(self, reading: Reading, places: list[int]) -> bool:
        """Whether reading these places is worth its pass."""
        if reading.worth is None or not places:
            return True
        price, values = reading.worth.price(reading.growth.nodes), reading.growth.values
        gain = sum(max(0.0, _FOLLOWED * values[place] - price) for place in places)
        return reading.worth.pays(gain, self.model.pass_seconds(len(places)) + self._besides)
