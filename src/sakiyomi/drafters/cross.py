"""A draft model with a tokenizer of its own: it writes text, and the text is proposed in the target's tokens.

The draft model is used as it is. Beside each request stands its committed text in the draft's tokens, kept up to date
by ``Mirror``; the draft reads some of its own tokens ahead of it, and ``continuation`` says them in tokens of the
target. They are proposed as point masses, which every acceptance rule keeps lossless: greedy, and sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sakiyomi.alignment import Lexicon, Mirror, continuation
from sakiyomi.drafters.base import Context
from sakiyomi.params import SamplingParams
from sakiyomi.tree import Draft, DraftKind, Draw, TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.drafters.model import ModelDrafter
    from sakiyomi.model import PackedModel

__all__ = ["CrossDrafter"]

TAIL = 8
"""Committed tokens that are tokenised again together with what follows them."""
SETTLING = 0.5
"""Target tokens of text read beyond those wanted: which token a text's end becomes is settled by what follows it."""
WITHIN = 4
"""Draft tokens that may be taken back because the text ends inside a longer one."""
TRIES = 2
"""Other texts that are asked for where the target's tokens speak against the first."""
BANNED = -math.inf
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


@dataclass(frozen=True, slots=True)
class _Said:
    """What the draft's text is in tokens of the target, with the chance of each; see ``Continuation.natural``."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    natural: bool

    def draft(self, name: str, gamma: int) -> Draft:
        draws = tuple(Draw(node, name, None, chance) for node, chance in enumerate(self.chances[:gamma]))
        return Draft(TokenTree.chain(self.tokens[:gamma]), "point_mass", draws)


@dataclass(frozen=True, slots=True)
class _Lead:
    """From where the draft reads ahead.

    Attributes:
        inner: its context there.
        owed: bytes that are committed already, with which its text has to begin.
        first: its first token, where that is in the context already.
    """

    inner: Context
    owed: bytes
    first: Draft | None = None


def _among(tokens: list[int]) -> Any:
    """A logits processor that leaves some tokens alone to choose from."""

    def keep(_: Tensor, scores: Tensor) -> Tensor:
        left = scores.new_full(scores.shape, -math.inf)
        left[:, tokens] = scores[:, tokens]
        return left

    return keep


def _joined(first: Draft, rest: Draft) -> Draft:
    """Two chains, one behind the other."""
    draws = (*first.draws, *(replace(draw, node=draw.node + len(first)) for draw in rest.draws))
    return Draft(TokenTree.chain((*first.tree.tokens, *rest.tree.tokens)), "point_mass", draws)


class CrossDrafter:
    """Drafts a chain with a small causal LM whose tokenizer is not the target's.

    The draft proposes its most probable text, sampled or not: as a point mass it is kept with the target's chance of
    it, and no noise can be shared by two vocabularies.

    Args:
        inner: runs the draft model on its own tokens.
        tokenizer: of the draft.
        target_tokenizer: of the target.
        stop_ids: tokens with which the draft ends a text.
        name: names the source in traces.
    """

    kind: DraftKind = "point_mass"

    def __init__(
        self,
        inner: ModelDrafter,
        tokenizer: Any,
        target_tokenizer: Any,
        stop_ids: Sequence[int] = (),
        name: str = "cross",
    ) -> None:
        self.name, self._asked = name, 0.0
        self.alignment_seconds = 0.0
        """Spent on bringing the two texts together, without what the draft model took."""
        self._inner = inner
        self._own, self._target = Lexicon.of(tokenizer), Lexicon.of(target_tokenizer)
        self._start = tuple(i for i in tokenizer("")["input_ids"] if i not in stop_ids or i == tokenizer.bos_token_id)
        self._stop_ids = frozenset(stop_ids)
        self._end: int | None = target_tokenizer.eos_token_id

    @property
    def model(self) -> PackedModel:
        """The draft."""
        return self._inner.model

    @property
    def passes(self) -> int:
        """Passes of the draft."""
        return self._inner.passes

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
        began, asked = time.perf_counter(), self._asked
        rounds = []
        for context, gamma in zip(contexts, gammas, strict=True):
            reading = self._follow(context)
            reading.inner.nodes = self._steps(reading, context, gamma)
            rounds.append((context, reading))
        leads = [self._lead(*each) for each in rounds]
        # Without a begin token and before any text there is nothing to go on from.
        inners = [lead.inner for lead in leads if lead.inner.tokens]
        proposed = iter(self._ask(inners))
        drafts = []
        for (_, reading), lead in zip(rounds, leads, strict=True):
            draft = next(proposed) if lead.inner.tokens else Draft.empty()
            if lead.first is not None:
                self._inner.move(lead.inner, reading.inner, len(lead.inner.tokens) - 1)
                draft = _joined(lead.first, draft)
            drafts.append(draft)
        said = [
            self._translate(context, lead.owed, draft)
            for (context, _), lead, draft in zip(rounds, leads, drafts, strict=True)
        ]
        for i, (each, draft) in enumerate(zip(rounds, drafts, strict=True)):
            if not said[i].natural and leads[i].first is None:
                said[i] = self._again(*each, draft) or said[i]
        found = [each.draft(self.name, gamma) for each, gamma in zip(said, gammas, strict=True)]
        self.alignment_seconds += time.perf_counter() - began - (self._asked - asked)
        return found

    def _reading(self, context: Context) -> _Reading:
        found: _Reading | None = context.memory.get(self.name)
        if found is None:
            mirror = Mirror(self._own, self._start)
            inner = Context(
                context.id,
                mirror.tokens,
                SamplingParams(temperature=0.0, tree="chain"),
                "greedy",
                context.noise,
                self._stop_ids,
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
        return max(1, math.ceil((gamma + SETTLING) * target / own)) if own and target else gamma

    def _lead(self, context: Context, reading: _Reading) -> _Lead:
        """From where the draft goes on: where its last tokens would hardly stand so in a longer text, before them.

        The text may end inside a word, or inside a character, where the draft's tokens do not. Then it chooses among
        those that say its last ones and more: after "the lit" it reads "the" and says " little".
        """
        inner, owed = reading.inner, reading.mirror.pending
        for count in range(min(WITHIN, len(inner.tokens) - reading.mirror.start), -1, -1):
            last = inner.tokens[len(inner.tokens) - count :]
            said = self._own.bytes_of(last) + owed
            if not said or not all(map(self._own.piece, last)):
                continue
            longer = self._own.longer(said)
            if not longer:
                continue
            params = replace(inner.params, logits_processors=(_among([*longer, *last[:1]]),))
            shorter = replace(inner, tokens=inner.tokens[: len(inner.tokens) - count], params=params, memory={})
            if not shorter.tokens:
                continue
            first = self._beside(inner, shorter, 1)
            token = first.tree.tokens[0] if len(first) else -1
            if token not in longer:
                break
            if not continuation(self._target, context.tokens[-TAIL:], self._own.piece(token)[len(said) :]).natural:
                break
            other = replace(inner, tokens=[*shorter.tokens, token], memory={})
            self._inner.move(inner, other, len(shorter.tokens))
            return _Lead(other, said, first)
        return _Lead(inner, owed)

    def _translate(self, context: Context, owed: bytes, draft: Draft) -> _Said:
        """The draft's text in tokens of the target, without what it owes to what is committed."""
        pending = len(owed)
        said = bytearray()
        begins: list[int] = []  # byte of the said text at which each draft token begins
        ended = False
        for token in draft.tree.tokens:
            piece = self._own.piece(token)
            ended = token in self._stop_ids
            if ended or not piece:
                break
            begins.append(len(said) - pending)
            said += piece
        if not said.startswith(owed):
            return _Said((), (), natural=True)
        ahead = continuation(self._target, context.tokens[-TAIL:], bytes(said[pending:]))
        tokens, ends = ahead.tokens, ahead.ends
        if ended and self._end in context.stop_ids and (ends[-1] if ends else 0) == len(said) - pending:
            tokens.append(self._end)
            ends.append(len(said) - pending + 1)
            begins.append(len(said) - pending)
        chances: list[float] = []
        place = 0
        for end in ends:
            chance = 1.0  # of all draft tokens that had to be right for this one, and not for those before
            while place < len(begins) and begins[place] < end:
                known = draft.draws[place].prob
                chance *= 1.0 if known is None else known
                place += 1
            chances.append(chance)
        return _Said(tuple(tokens), tuple(chances), ahead.natural)

    def _again(self, context: Context, reading: _Reading, draft: Draft) -> _Said | None:
        """Another text, where the first would have had the target's tokens end elsewhere than they do.

        The target said "▁s", and it has a token "▁so": what follows is not an "o". The draft knows the text alone, so
        it is asked for what is likeliest after its first thought, and goes on from there.
        """
        inner, steps, tried = reading.inner, reading.inner.nodes, [draft.tree.tokens[0]]
        for _ in range(TRIES):
            params = replace(inner.params, logit_bias=dict.fromkeys(tried, BANNED))
            first = self._beside(inner, replace(inner, params=params, memory={}), 1)
            if not first.draws:
                return None
            token = first.tree.tokens[0]
            tried.append(token)
            if continuation(self._target, context.tokens[-TAIL:], self._own.piece(token)).natural:
                longer = replace(inner, tokens=[*inner.tokens, token], memory={})
                rest = self._beside(inner, longer, max(steps - 1, 1))
                said = self._translate(context, reading.mirror.pending, _joined(first, rest))
                if said.natural:
                    return said
        return None

    def _beside(self, inner: Context, other: Context, steps: int) -> Draft:
        """What the draft proposes in another context than the request's own, on the same place in its cache."""
        other.nodes = steps
        shared = min(len(inner.tokens), len(other.tokens))
        self._inner.move(inner, other, shared)
        try:
            return self._ask([other])[0]
        finally:
            self._inner.move(other, inner, shared)

    def _ask(self, inners: Sequence[Context]) -> list[Draft]:
        """The draft's own proposals, as deep as their ``nodes``."""
        began = time.perf_counter()
        drafts = self._inner.propose(inners, [inner.nodes for inner in inners]) if inners else []
        self._asked += time.perf_counter() - began
        return drafts
