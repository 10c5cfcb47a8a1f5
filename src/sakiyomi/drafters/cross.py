"""A draft model with a tokenizer of its own: it writes text, and the text is proposed in the target's tokens.

The draft model is used as it is. Beside each request stands its committed text in the draft's tokens, kept up to date
by ``Mirror``; the draft reads some of its own tokens ahead of it, and ``continuation`` says them in tokens of the
target. They are proposed as point masses, which every acceptance rule keeps lossless: greedy, and sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sakiyomi.alignment import Lexicon, Mirror, continuation
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.params import SamplingParams
from sakiyomi.tree import Draft, DraftKind, Draw, TokenTree

if TYPE_CHECKING:
    from sakiyomi.model import PackedModel

__all__ = ["CrossDrafter"]

TAIL = 16
"""Committed tokens that are tokenised again together with what follows them."""
RATIO_MEMORY = 64
"""Committed tokens over which bytes a token are measured, on both sides."""


@dataclass(eq=False, slots=True)
class _Reading:
    """One request as the draft reads it.

    Attributes:
        inner: the draft's own context; its tokens are the mirror's.
        mirror: the committed text in tokens of the draft.
        seen: committed tokens of the target that are in it.
    """

    inner: Context
    mirror: Mirror
    seen: int = 0


class CrossDrafter:
    """Drafts a chain with a small causal LM whose tokenizer is not the target's.

    The draft proposes its most probable text, sampled or not: as a point mass it is kept with the target's chance of
    it, and no noise can be shared by two vocabularies.

    Args:
        model: the draft.
        tokenizer: of the draft.
        target_tokenizer: of the target.
        stop_ids: tokens with which the draft ends a text.
        name: names the source in traces.
    """

    kind: DraftKind = "point_mass"

    def __init__(
        self,
        model: PackedModel,
        tokenizer: Any,
        target_tokenizer: Any,
        stop_ids: Sequence[int] = (),
        name: str = "cross",
    ) -> None:
        self.name = name
        self._inner = ModelDrafter(model, model.vocab_size, f"{name}-model")
        self._own, self._target = Lexicon.of(tokenizer), Lexicon.of(target_tokenizer)
        self._start = tuple(i for i in tokenizer("")["input_ids"] if i not in stop_ids or i == tokenizer.bos_token_id)
        self._stop_ids = frozenset(stop_ids)
        self._end = target_tokenizer.eos_token_id

    @property
    def model(self) -> PackedModel:
        """The draft."""
        return self._inner.model

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the draft's forwards so far, those over prompts included."""
        return self._inner.forward_seconds

    @property
    def prefill_seconds(self) -> float:
        """Those over prompts."""
        return self._inner.prefill_seconds

    def inherit(self, context: Context, earlier: Context) -> None:
        """Take the draft's place of an earlier request of the same conversation over."""
        before: _Reading | None = earlier.memory.pop(self.name, None)
        if before is not None:
            self._inner.inherit(self._reading(context).inner, before.inner)

    def end(self, context: Context) -> None:
        """Free the request's place."""
        reading: _Reading | None = context.memory.pop(self.name, None)
        if reading is not None:
            self._inner.end(reading.inner)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass of the draft a token of its own."""
        readings = [self._follow(context) for context in contexts]
        steps = [
            self._steps(reading, context, gamma)
            for reading, context, gamma in zip(readings, contexts, gammas, strict=True)
        ]
        for reading, count in zip(readings, steps, strict=True):
            reading.inner.nodes = count
        drafts = self._inner.propose([reading.inner for reading in readings], steps)
        return [
            self._translate(context, reading, draft, gamma)
            for context, reading, draft, gamma in zip(contexts, readings, drafts, gammas, strict=True)
        ]

    def _reading(self, context: Context) -> _Reading:
        found: _Reading | None = context.memory.get(self.name)
        if found is None:
            mirror = Mirror(self._own, self._start)
            inner = Context(
                context.id, mirror.tokens, SamplingParams(temperature=0.0), "greedy", context.noise, self._stop_ids
            )
            found = context.memory[self.name] = _Reading(inner, mirror)
        return found

    def _follow(self, context: Context) -> _Reading:
        """Bring the draft's text up to date."""
        reading = self._reading(context)
        same = reading.mirror.grow(self._target.bytes_of(context.tokens[reading.seen :]))
        reading.seen = len(context.tokens)
        room = self.model.max_context
        if len(reading.mirror.tokens) > room * 3 // 4:
            reading.mirror.forget(len(reading.mirror.tokens) - room // 2)
            same = 0
        self._inner.rewind(reading.inner, same)
        return reading

    def _steps(self, reading: _Reading, context: Context, gamma: int) -> int:
        """Draft tokens that say about as much as so many of the target's."""
        mine, theirs = reading.mirror.tokens[-RATIO_MEMORY:], context.tokens[-RATIO_MEMORY:]
        own = len(self._own.bytes_of(mine)) / len(mine) if mine else 1.0
        target = len(self._target.bytes_of(theirs)) / len(theirs)
        return max(1, math.ceil(gamma * target / own)) if own and target else gamma

    def _translate(self, context: Context, reading: _Reading, draft: Draft, gamma: int) -> Draft:
        """The draft's text in tokens of the target."""
        said, begins, chances = bytearray(), [], []
        ended = False
        for node, token in enumerate(draft.tree.tokens):
            piece = self._own.pieces[token] if token < len(self._own.pieces) else b""
            ended = token in self._stop_ids
            if ended or not piece:
                break
            begins.append(len(said))
            chances.append(draft.draws[node].prob or 1.0)
            said += piece
        pending = reading.mirror.pending
        if not said.startswith(pending):
            return Draft.empty()
        tokens, ends = continuation(self._target, context.tokens[-TAIL:], bytes(said[len(pending) :]))
        tokens = tokens[:gamma]
        if not tokens:
            return Draft.empty()
        place = 0
        draws = []
        for node, end in enumerate(ends[: len(tokens)]):
            chance = 1.0
            while place < len(begins) and begins[place] < end + len(pending):
                chance *= chances[place]
                place += 1
            draws.append(Draw(node, self.name, None, chance))
        return Draft(TokenTree.chain(tokens), "point_mass", tuple(draws))
