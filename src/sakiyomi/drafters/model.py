"""A small language model reads ahead: raw passes on a cache of its own, which lives as long as the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sakiyomi.drafters.base import Context
from sakiyomi.kernels.plan import Segment
from sakiyomi.numerics import Row, draw
from sakiyomi.sampling import Sampler
from sakiyomi.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.warping import best_token

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.model import PackedModel

__all__ = ["ModelDrafter"]

LONG = 64  # tokens from which on catching up is a prompt's work, in chunks, without logits of every row
CHUNK = 512


@dataclass(eq=False, slots=True)
class _Seat:
    """A request's place in the draft's cache, and the tokens whose keys and values lie there."""

    slot: int
    held: list[int]
    sampler: Sampler


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
        self._target_vocab = vocab_size
        self._shared = min(vocab_size, model.vocab_size)

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the draft's forwards so far, those over prompts included."""
        return self.model.forward_seconds

    def end(self, context: Context) -> None:
        """Free the request's place."""
        seat = context.memory.pop(self.name, None)
        if seat is not None:
            self.model.cache.release(seat.slot)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass a depth."""
        # The draft's own context may be shorter than the target's: where it ends, it proposes nothing more.
        limit = self.model.max_context
        gammas = [min(gamma, limit - len(c.tokens)) for c, gamma in zip(contexts, gammas, strict=True)]
        chains = {c.id: _Chain(c, gamma) for c, gamma in zip(contexts, gammas, strict=True) if gamma > 0}
        for chain in chains.values():
            self._seat(chain.context)
            self._catch_up(chain.context)
        active = list(chains.values())
        while active:
            segments = []
            for chain in active:
                seat: _Seat = chain.context.memory[self.name]
                fresh = self._missing(chain)
                self.model.cache.reserve(seat.slot, len(seat.held) + len(fresh))
                segments.append(Segment(seat.slot, len(seat.held), fresh))
                seat.held.extend(fresh)
            logits = self.model.score(segments)
            row = -1
            for chain, segment in zip(active, segments, strict=True):
                row += len(segment.tokens)
                self._extend(chain, logits[row])
            active = [chain for chain in active if not chain.done]
        return [chains[c.id].draft(self.name) if c.id in chains else Draft.empty() for c in contexts]

    def _seat(self, context: Context) -> None:
        """Give the request a place, and forget what is held there but was not accepted."""
        seat = context.memory.get(self.name)
        if seat is None:
            sampler = Sampler(context.params, self._shared, draft=True)
            seat = context.memory[self.name] = _Seat(self.model.cache.take(), [], sampler)
        held, tokens = seat.held, context.tokens
        right = context.memory.get(self.name + ".sure", 0)
        while right < len(held) and right < len(tokens) - 1 and held[right] == tokens[right]:
            right += 1
        del held[right:]
        context.memory[self.name + ".sure"] = right

    def _catch_up(self, context: Context) -> None:
        """Run a prompt, or a long stretch without drafting, through the draft."""
        seat: _Seat = context.memory[self.name]
        before = self.model.forward_seconds
        most = LONG if seat.held else 1
        while len(context.tokens) - len(seat.held) > most:
            fresh = context.tokens[len(seat.held) : min(len(seat.held) + CHUNK, len(context.tokens) - 1)]
            self.model.cache.reserve(seat.slot, len(seat.held) + len(fresh))
            self.model.score([Segment(seat.slot, len(seat.held), fresh, prompt=True)], last=True)
            seat.held.extend(fresh)
        self.prefill_seconds += self.model.forward_seconds - before

    def _missing(self, chain: _Chain) -> list[int]:
        held = len(chain.context.memory[self.name].held)
        return chain.tokens[-1:] if chain.tokens else chain.context.tokens[held:]

    def _extend(self, chain: _Chain, logits: Tensor) -> None:
        """Choose the next token of a chain from the logits (V,) of its last one."""
        context = chain.context
        sampler: Sampler = context.memory[self.name].sampler
        logits = logits[: self._shared]
        if sampler.edits:
            logits = sampler.process(logits[None], [chain.tokens], context.tokens)[0]
        if context.rule == "greedy":
            chain.add(best_token(logits), None, None)
            return
        probs = np.zeros(self._target_vocab, np.float32)
        support = sampler.fill(logits, probs[: self._shared])
        if context.rule == "coupled":
            token = context.noise.top(len(context.tokens) + len(chain.tokens), probs, support=support)[0]
            chain.add(token, None, float(probs[token]))
        else:
            token = draw(probs, context.noise.fork(self.name).uniform(), support)
            chain.add(token, probs, float(probs[token]))


class _Chain:
    """The draft of one request while it grows."""

    def __init__(self, context: Context, gamma: int) -> None:
        self.context, self.gamma = context, gamma
        self.tokens: list[int] = []
        self.rows: list[Row] = []
        self.chances: list[float | None] = []

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.gamma or self.tokens[-1] in self.context.stop_ids

    def add(self, token: int, row: Row | None, chance: float | None) -> None:
        self.tokens.append(token)
        self.chances.append(chance)
        if row is not None:
            self.rows.append(row)

    def draft(self, name: str) -> Draft:
        drawn = bool(self.rows)
        draws = tuple(Draw(i, name, i if drawn else None, chance) for i, chance in enumerate(self.chances))
        probs = torch.from_numpy(np.stack(self.rows)) if drawn else None
        return Draft(TokenTree.chain(self.tokens), "chain" if drawn else "point_mass", draws, probs)
