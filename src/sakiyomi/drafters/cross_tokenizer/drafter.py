"""A draft model with a tokenizer of its own: it writes text, and the text is proposed in the target's tokens.

The draft model is used as it is. Beside each request stands its committed text in the draft's tokens, kept up to date
by ``Mirror``; the draft reads some of its own tokens ahead of it, and ``continuation`` says them in tokens of the
target. They are proposed as point masses, which every acceptance rule keeps lossless: greedy, and sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft, DraftKind, TokenTree
from sakiyomi.drafters.base import Context, Drafter
from sakiyomi.drafters.cross_tokenizer.alignment import Lexicon, Mirror, continuation
from sakiyomi.drafters.cross_tokenizer.translation import Translation, Translator

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.drafters.model import ModelDrafter
    from sakiyomi.model_executor.runner import ModelRunner

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
WIDEST = 15
"""Most nodes of a tree whose size is a matter of costs."""
RATIO_MEMORY = 64
"""Committed tokens over which bytes a token are measured, on both sides."""
BROADER = 2.0
"""A tree of the draft has so many times as many nodes as say the target's: what is read beyond them settles chances."""


@dataclass(eq=False, slots=True)
class _Reading:
    """One request as the draft reads it.

    Attributes:
        inner: the draft's own context; its tokens are the mirror's.
        mirror: the committed text in tokens of the draft.
        seen: committed tokens of the target that are in it.
        size: bytes of a token of the target, of late.
        tail: the last committed bytes.
    """

    inner: Context
    mirror: Mirror
    seen: int = 0
    size: float = 0.0
    tail: bytes = b""


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


@dataclass(eq=False, slots=True)
class _Round:
    """What is asked for a request in a round, and what the draft said.

    Attributes:
        context: of the request.
        depth: levels wanted, in tokens of the target.
        nodes: nodes wanted; ``depth`` of them are a chain.
        reading: of the request.
        steps: levels of the draft's own tree.
        lead: from where it is read.
        draft: the draft's own proposal.
    """

    context: Context
    depth: int
    nodes: int
    reading: _Reading
    steps: int
    lead: _Lead
    draft: Draft = field(default_factory=Draft.empty)


def _among(tokens: list[int]) -> Any:
    """A logits processor that leaves some tokens alone to choose from."""

    def keep(_: Tensor, scores: Tensor) -> Tensor:
        left = scores.new_full(scores.shape, -math.inf)
        left[:, tokens] = scores[:, tokens]
        return left

    return keep


def _joined(first: Draft, rest: Draft) -> Draft:
    """A draft behind a chain."""
    size = len(first)
    draws = (*first.draws, *(replace(draw, node=draw.node + size) for draw in rest.draws))
    parents = (*range(-1, size - 1), *(parent + size for parent in rest.tree.parents))
    return Draft(TokenTree((*first.tree.tokens, *rest.tree.tokens), parents), "point_mass", draws)


class CrossDrafter(Drafter):
    """Drafts a chain, or a tree, with a small causal LM whose tokenizer is not the target's.

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
    runs_model = True
    model: ModelRunner

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
        self._inner, self.model = inner, inner.model
        self._own, self._target = Lexicon.of(tokenizer), Lexicon.of(target_tokenizer)
        self._start = tuple(i for i in tokenizer("")["input_ids"] if i not in stop_ids or i == tokenizer.bos_token_id)
        self._stop_ids = frozenset(stop_ids)
        self._end: int | None = target_tokenizer.eos_token_id
        self._translator = Translator(self._own, self._target, self._stop_ids, self._end)

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
        """See ``Drafter.propose``; all requests advance together, a pass of the draft a level of its own tokens."""
        began, asked = time.perf_counter(), self._asked
        rounds = [self._begin(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]
        # Without a begin token and before any text there is nothing to go on from.
        ready = [each for each in rounds if each.lead.inner.tokens]
        drafts = self._ask([each.lead.inner for each in ready], [each.steps for each in ready])
        for each, draft in zip(ready, drafts, strict=True):
            each.draft = draft
            if each.lead.first is not None:
                inner = each.lead.inner
                self._inner.move(inner, each.reading.inner, len(inner.tokens) - 1)
                each.draft = _joined(each.lead.first, draft)
        found = [self._say(each).draft(self.name) for each in rounds]
        self.alignment_seconds += time.perf_counter() - began - (self._asked - asked)
        return found

    def _begin(self, context: Context, gamma: int) -> _Round:
        reading = self._follow(context)
        inner = reading.inner
        nodes = context.nodes if inner.params.tree != "chain" else gamma
        if context.worth is not None:
            nodes = min(nodes, WIDEST)
        ratio = self._ratio(reading)
        steps = max(1, math.ceil((gamma + SETTLING) * ratio))
        inner.nodes = steps if nodes <= gamma else max(steps, math.ceil(BROADER * nodes * ratio))
        return _Round(context, gamma, nodes, reading, steps, self._lead(reading))

    def _say(self, each: _Round) -> Translation:
        """A round's draft in the target's tokens, or another's, where nobody would go on with the first as it is."""
        said = self._translate(each, each.lead.owed, each.draft)
        if not said.natural and each.lead.first is None:
            said = self._again(each) or said
        return said

    def _reading(self, context: Context) -> _Reading:
        found: _Reading | None = context.memory.get(self.name)
        if found is None:
            mirror = Mirror(self._own, self._start)
            inner = Context(
                context.id,
                mirror.tokens,
                SamplingParams(temperature=0.0, tree=context.params.builder),
                "greedy",
                context.noise,
                self._stop_ids,
                shares=context.shares,
            )
            found = context.memory[self.name] = _Reading(inner, mirror)
        return found

    def _follow(self, context: Context) -> _Reading:
        """Bring the draft's text up to date."""
        reading = self._reading(context)
        fresh = context.tokens[reading.seen :]
        said = self._target.bytes_of(fresh)
        same = reading.mirror.grow(said)
        share = max(len(fresh) / RATIO_MEMORY, len(fresh) / len(context.tokens))
        if fresh:
            reading.size += min(1.0, share) * (len(said) / len(fresh) - reading.size)
        reading.seen = len(context.tokens)
        reading.tail = self._target.tail(context.tokens[-TAIL:])
        room = self.model.max_context
        if len(reading.mirror.tokens) > room * 3 // 4:
            reading.mirror.forget(len(reading.mirror.tokens) - room // 2)
            same = 0
        self._inner.rewind(reading.inner, same)
        return reading

    def _ratio(self, reading: _Reading) -> float:
        """Draft tokens that say about as much as one of the target's."""
        mirror = reading.mirror
        count = min(RATIO_MEMORY, len(mirror.tokens) - mirror.start)
        own = self._own.bytes_of(mirror.tokens[-count:]) if count else b""
        return reading.size * count / len(own) if own and reading.size else 1.0

    def _lead(self, reading: _Reading) -> _Lead:
        """From where the draft goes on: where its last tokens would hardly stand so in a longer text, before them.

        The text may end inside a word, or inside a character, where the draft's tokens do not. Then it chooses among
        those that say its last ones and more: after "the lit" it reads "the" and says " little".
        """
        inner, owed = reading.inner, reading.mirror.pending
        for count, said in reversed(self._last(reading)):
            longer = self._own.longer(said)
            if not longer or count == len(inner.tokens):
                continue
            last = inner.tokens[len(inner.tokens) - count :]
            params = replace(inner.params, logits_processors=(_among([*longer, *last[:1]]),))
            shorter = replace(inner, tokens=inner.tokens[: len(inner.tokens) - count], params=params, memory={})
            first = self._beside(inner, shorter, 1)
            token = first.tree.tokens[0] if len(first) else -1
            if token not in longer:
                break
            if not continuation(self._target, reading.tail, self._own.piece(token)[len(said) :]).natural:
                break
            other = replace(inner, tokens=[*shorter.tokens, token], memory={})
            self._inner.move(inner, other, len(shorter.tokens))
            return _Lead(other, said, first)
        return _Lead(inner, owed)

    def _last(self, reading: _Reading) -> list[tuple[int, bytes]]:
        """So many of the draft's last tokens, and what they say, as far as a token might say all of it and more."""
        tokens, said = reading.inner.tokens, reading.mirror.pending
        found = [(0, said)] if said else []
        for count in range(1, min(WITHIN, len(tokens) - reading.mirror.start) + 1):
            piece = self._own.piece(tokens[-count])
            # Mostly there is none, and no list of tokens has to be asked.
            if not piece or (said and self._own.borders.apart(piece[-1], said[0])):
                break
            said = piece + said
            found.append((count, said))
        return found

    def _translate(self, each: _Round, owed: bytes, draft: Draft) -> Translation:
        """The draft's text in tokens of the target, without what it owes to what is committed."""
        reading, context, translator = each.reading, each.context, self._translator
        ends = self._end in context.stop_ids
        if each.nodes <= each.depth:
            return translator.chain(reading.tail, owed, draft, each.depth, ends=ends)
        return translator.tree(reading.tail, owed, draft, each.depth, each.nodes, ends=ends, worth=context.worth)

    def _again(self, each: _Round) -> Translation | None:
        """Another text, where the first would have had the target's tokens end elsewhere than they do.

        The target said "▁s", and it has a token "▁so": what follows is not an "o". The draft knows the text alone, so
        it is asked for what is likeliest after its first thought, and goes on from there.
        """
        reading, inner = each.reading, each.reading.inner
        tried = [each.draft.tree.tokens[node] for node in each.draft.tree.children(-1)]
        for _ in range(TRIES):
            params = replace(inner.params, logit_bias=dict.fromkeys(tried, BANNED))
            first = self._beside(inner, replace(inner, params=params, memory={}, nodes=1), 1)
            if not first.draws:
                return None
            token = first.tree.tokens[0]
            tried.append(token)
            if continuation(self._target, reading.tail, self._own.piece(token)).natural:
                longer = replace(inner, tokens=[*inner.tokens, token], memory={})
                rest = self._beside(inner, longer, max(each.steps - 1, 1))
                said = self._translate(each, reading.mirror.pending, _joined(first, rest))
                if said.natural:
                    return said
        return None

    def _beside(self, inner: Context, other: Context, steps: int) -> Draft:
        """What the draft proposes in another context than the request's own, on the same place in its cache."""
        if steps == 1:
            other.nodes = 1
        shared = min(len(inner.tokens), len(other.tokens))
        self._inner.move(inner, other, shared)
        try:
            return self._ask([other], [steps])[0]
        finally:
            self._inner.move(other, inner, shared)

    def _ask(self, inners: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        """The draft's own proposals, so deep, of as many nodes as their contexts say."""
        began = time.perf_counter()
        drafts = self._inner.propose(inners, depths) if inners else []
        self._asked += time.perf_counter() - began
        return drafts
