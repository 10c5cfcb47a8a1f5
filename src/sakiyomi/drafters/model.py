"""A small language model reads ahead: raw passes on a cache of its own, which lives as long as the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from sakiyomi.drafters.base import Context
from sakiyomi.errors import MemoryLimitError
from sakiyomi.kernels.plan import Segment
from sakiyomi.numerics import Row, draw
from sakiyomi.sampling import Sampler
from sakiyomi.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.warping import best, best_token

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.model import PackedModel

__all__ = ["ModelDrafter"]

Rows = NDArray[np.float32]
LONG = 64  # tokens from which on catching up is a prompt's work, in chunks, without logits of every row
CHUNK = 512


@dataclass(eq=False, slots=True)
class _Seat:
    """A request's place in the draft's cache, and the tokens whose keys and values lie there."""

    slot: int
    held: list[int]
    sampler: Sampler
    sure: int = 0  # so many of those held were compared with the committed tokens before


class ModelDrafter:
    """Drafts a chain with a small causal LM.

    Under "greedy" it proposes its most probable tokens, under "ratio" it draws from its distribution after the same
    warpers as the target's, and keeps it; under "coupled" it takes the top of log q + the position's noise.

    Args:
        model: the draft.
        vocab_size: of the target; the draft's may be padded differently.
        name: names the source in traces.
    """

    kind: DraftKind = "chain"

    def __init__(self, model: PackedModel, vocab_size: int, name: str = "model") -> None:
        self.model, self.name = model, name
        self.prefill_seconds = 0.0
        self._vocab_size = vocab_size

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the draft's forwards so far, those over prompts included."""
        return self.model.forward_seconds

    def inherit(self, context: Context, earlier: Context) -> None:
        """Take the place of an earlier request of the same conversation over, with the tokens that it holds."""
        seat: _Seat | None = earlier.memory.pop(self.name, None)
        if seat is not None:
            sampler = Sampler(context.params, self._vocab_size)
            context.memory[self.name] = _Seat(seat.slot, seat.held, sampler)

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
                seat.slot, seat.held, Sampler(destination.params, self._vocab_size), seat.sure
            )
            self.rewind(destination, length)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass a depth."""
        chains: dict[int, _Chain] = {}
        for context, gamma in zip(contexts, gammas, strict=True):
            # The draft's own context may be shorter than the target's: where it ends, it proposes nothing more.
            gamma = min(gamma, self.model.max_context - len(context.tokens))
            if gamma > 0 and self._follow(context):
                chains[context.id] = _Chain(context, gamma)
        active = list(chains.values())
        while active:
            segments = []
            for chain in list(active):
                seat: _Seat = chain.context.memory[self.name]
                fresh = self._missing(chain)
                if not self._has_room(seat, len(fresh)):
                    active.remove(chain)
                    continue
                segments.append(Segment(seat.slot, len(seat.held), fresh))
            if not active:
                break
            logits = self.model.score(segments)
            row = -1
            for chain, segment in zip(active, segments, strict=True):
                row += len(segment.tokens)
                # Not before the pass: interrupted, it would leave tokens here whose keys were never written.
                chain.context.memory[self.name].held.extend(segment.tokens)
                self._extend(chain, logits[row])
            active = [chain for chain in active if not chain.done]
        return [chains[c.id].draft(self.name) if c.id in chains else Draft.empty() for c in contexts]

    def _follow(self, context: Context) -> bool:
        """Bring the request's place up to date, a chunk at most; whether the draft can go on from there this round."""
        seat = self._seat(context)
        before = self.model.forward_seconds
        if len(context.tokens) - len(seat.held) > (LONG if seat.held else 1):
            fresh = context.tokens[len(seat.held) : min(len(seat.held) + CHUNK, len(context.tokens) - 1)]
            if not self._knows(fresh) or not self._has_room(seat, len(fresh)):
                return False
            self.model.score([Segment(seat.slot, len(seat.held), fresh, prompt=True)], last=True)
            seat.held.extend(fresh)
        self.prefill_seconds += self.model.forward_seconds - before
        missing = context.tokens[len(seat.held) :]
        return len(missing) <= LONG and self._knows(missing)

    def _seat(self, context: Context) -> _Seat:
        """The request's place, without what is held there but was not accepted."""
        seat: _Seat | None = context.memory.get(self.name)
        if seat is None:
            sampler = Sampler(context.params, self._vocab_size)
            seat = context.memory[self.name] = _Seat(self.model.cache.take(), [], sampler)
        held, tokens = seat.held, context.tokens
        right = seat.sure
        while right < len(held) and right < len(tokens) - 1 and held[right] == tokens[right]:
            right += 1
        del held[right:]
        seat.sure = right
        return seat

    def _knows(self, tokens: Sequence[int]) -> bool:
        """Whether the draft has these tokens: the target's vocabulary may be padded further than its own."""
        return self.model.vocab_size >= self._vocab_size or max(tokens) < self.model.vocab_size

    def _has_room(self, seat: _Seat, count: int) -> bool:
        """Room for more tokens. Without the memory for it the request goes on undrafted."""
        try:
            self.model.cache.reserve(seat.slot, len(seat.held) + count)
        except MemoryLimitError:
            return False
        return True

    def _missing(self, chain: _Chain) -> list[int]:
        held = len(chain.context.memory[self.name].held)
        return chain.tokens[-1:] if chain.tokens else chain.context.tokens[held:]

    def _extend(self, chain: _Chain, logits: Tensor) -> None:
        """Choose the next token of a chain from the logits (V of the draft,) of its last one."""
        missing = self._vocab_size - logits.shape[0]
        if missing:  # vocabularies may be padded differently
            logits = F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:missing]
        try:
            self._choose(chain, logits)
        except Exception:
            # The user's own processor, or no token left: the target's rows meet it too, and end this request alone.
            chain.stopped = True

    def _choose(self, chain: _Chain, logits: Tensor) -> None:
        context = chain.context
        sampler: Sampler = context.memory[self.name].sampler
        if sampler.edits:
            logits = sampler.process(logits[None], [chain.tokens], context.tokens)[0]
        if context.rule == "greedy":
            # Its probability as the target's in traces, at temperature 1. An accelerator is not asked for it.
            chain.add(*(best(logits) if logits.is_cpu else (best_token(logits), None)))
            return
        probs = chain.row(self._vocab_size)
        support = sampler.fill(logits, probs)
        if context.rule == "coupled":
            token = context.noise.top(len(context.tokens) + len(chain.tokens), probs, support=support)[0]
            chain.add(token, float(probs[token]))
        else:
            token = draw(probs, context.noise.fork(self.name).uniform(), support)
            chain.add(token, float(probs[token]), drawn=True)


class _Chain:
    """The draft of one request while it grows."""

    def __init__(self, context: Context, gamma: int) -> None:
        self.context, self.gamma, self.stopped = context, gamma, False
        self.tokens: list[int] = []
        self.chances: list[float | None] = []
        self._rows: Rows | None = None
        self._drawn = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.gamma or self.tokens[-1] in self.context.stop_ids

    def row(self, width: int) -> Row:
        """Where the distribution of the next token goes, (width,)."""
        if self._rows is None:
            self._rows = np.empty((self.gamma, width), np.float32)
        row: Row = self._rows[len(self.tokens)]
        return row

    def add(self, token: int, chance: float | None, *, drawn: bool = False) -> None:
        """The next token; ``drawn`` from the distribution in its row."""
        self.tokens.append(token)
        self.chances.append(chance)
        self._drawn = drawn

    def draft(self, name: str) -> Draft:
        drawn, count = self._drawn, len(self.tokens)
        draws = tuple(Draw(i, name, i if drawn else None, chance) for i, chance in enumerate(self.chances))
        probs = torch.from_numpy(self._rows[:count]) if drawn and self._rows is not None else None
        return Draft(TokenTree.chain(self.tokens), "chain" if drawn else "point_mass", draws, probs)
