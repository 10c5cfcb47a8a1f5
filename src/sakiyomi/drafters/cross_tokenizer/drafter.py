"""Drafts with a model that has another tokenizer than the target: its text is proposed in the target's tokens.

``Mirror`` keeps each request's committed text in the draft's tokens. The draft model generates some tokens behind it,
and ``Translator`` converts them to tokens of the target. They are proposed as point masses, which are lossless under
every acceptance rule.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft, DraftKind, TokenTree
from sakiyomi.drafters.base import Context, Drafter
from sakiyomi.drafters.cross_tokenizer.alignment import Lexicon, Mirror, continuation
from sakiyomi.drafters.cross_tokenizer.translation import Translation, Translator
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.model_executor.runner import ModelRunner

TAIL = 8
"""Last committed tokens that are re-tokenised together with what follows them."""
SETTLING = 0.5
"""Extra target tokens of text that the draft generates: the last token of a text depends on what follows it."""
WITHIN = 4
"""Most draft tokens that are replaced where the text may end inside a longer token."""
TRIES = 2
"""Other texts that are tried where the target's tokens do not fit the first."""
BANNED = -math.inf
WIDEST = 15
"""Most nodes of a tree whose size is chosen by costs."""
RATIO_MEMORY = 64
"""Committed tokens over which the bytes of a token are averaged, for both tokenizers."""
BROADER = 2.0
"""Nodes of the draft model's tree for each node of the target's: the others make chances more precise."""


@dataclass(eq=False, slots=True)
class _DraftSide:
    """One request on the side of the draft model.

    Attributes:
        inner: the draft model's own context; its tokens are the mirror's.
        mirror: the committed text in tokens of the draft model.
        seen: committed tokens of the target that are in it.
        size: mean bytes of a token of the target, of late.
        tail: the last committed bytes.
    """

    inner: Context
    mirror: Mirror
    seen: int = 0
    size: float = 0.0
    tail: bytes = b""


@dataclass(eq=False, slots=True)
class _Round:
    """One request in a round.

    Attributes:
        context: of the request.
        depth: levels wanted, in tokens of the target.
        nodes: nodes wanted; if there are not more than ``depth``, a chain.
        side: the request on the side of the draft model.
        steps: levels of the draft model's own tree.
        inner: the draft model's context where it starts to write.
        owed: committed bytes with which its text has to begin.
        first: its first token, where that is in the context already.
        draft: the draft model's own proposal.
    """

    context: Context
    depth: int
    nodes: int
    side: _DraftSide
    steps: int
    inner: Context
    owed: bytes
    first: Draft | None
    draft: Draft = field(default_factory=Draft.empty)


def _among(tokens: list[int]) -> Any:
    """A logits processor that allows these tokens only."""

    def keep(_: Tensor, scores: Tensor) -> Tensor:
        left = scores.new_full(scores.shape, -math.inf)
        left[:, tokens] = scores[:, tokens]
        return left

    return keep


def _joined(first: Draft, rest: Draft) -> Draft:
    """A draft appended to a chain."""
    size = len(first)
    draws = (*first.draws, *(draw._replace(node=draw.node + size) for draw in rest.draws))
    parents = (*range(-1, size - 1), *(parent + size for parent in rest.tree.parents))
    return Draft(TokenTree((*first.tree.tokens, *rest.tree.tokens), parents), "point_mass", draws)


class CrossDrafter(Drafter):
    """Drafts a chain or a tree with a small causal LM whose tokenizer is not the target's.

    The draft model proposes its most probable text, also when the target samples. As a point mass it is accepted with
    the target's probability of it. Two vocabularies cannot share the coupled rule's noise.

    Args:
        inner: runs the draft model on its own tokens.
        tokenizer: of the draft.
        target_tokenizer: of the target.
        stop_ids: tokens with which the draft ends a text.
    """

    name = "cross"
    kind: DraftKind = "point_mass"
    runs_model = True
    model: ModelRunner

    def __init__(
        self, inner: ModelDrafter, tokenizer: Any, target_tokenizer: Any, stop_ids: Sequence[int] = ()
    ) -> None:
        self._asked = 0.0
        self.alignment_seconds = 0.0
        """Seconds spent on translating between the two tokenizers, without those of the draft model."""
        self._inner, self.members, self.model = inner, (inner,), inner.model
        self._own, self._target = Lexicon.of(tokenizer), Lexicon.of(target_tokenizer)
        self._prefix = tuple(i for i in tokenizer("")["input_ids"] if i not in stop_ids or i == tokenizer.bos_token_id)
        self._stop_ids = frozenset(stop_ids)
        self._end: int | None = target_tokenizer.eos_token_id
        self._translator = Translator(self._own, self._target, self._stop_ids, self._end)

    def inherit(self, context: Context, earlier: Context) -> None:
        """See ``Drafter.inherit``: the draft model's slot is taken over."""
        before: _DraftSide | None = earlier.memory.pop(self.name, None)
        if before is not None:
            self._inner.inherit(self._side(context).inner, before.inner)

    def end(self, context: Context) -> None:
        """Free the request's slot."""
        side: _DraftSide | None = context.memory.pop(self.name, None)
        if side is not None:
            self._inner.end(side.inner)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass of the draft model for each level."""
        began, asked = time.perf_counter(), self._asked
        rounds = [self._begin(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]
        # Without a begin token and before any text the draft model has nothing to continue.
        ready = [each for each in rounds if each.inner.tokens]
        drafts = self._ask([each.inner for each in ready], [each.steps for each in ready])
        for each, draft in zip(ready, drafts, strict=True):
            each.draft = draft
            if each.first is not None:
                self._inner.move(each.inner, each.side.inner, len(each.inner.tokens) - 1)
                each.draft = _joined(each.first, draft)
        found = [self._translated(each).draft(self.name) for each in rounds]
        self.alignment_seconds += time.perf_counter() - began - (self._asked - asked)
        return found

    def _begin(self, context: Context, gamma: int) -> _Round:
        side = self._update(context)
        inner = side.inner
        nodes = context.nodes if inner.params.tree != "chain" else gamma
        if context.worth is not None:
            nodes = min(nodes, WIDEST)
        ratio = self._ratio(side)
        steps = max(1, math.ceil((gamma + SETTLING) * ratio))
        inner.nodes = steps if nodes <= gamma else max(steps, math.ceil(BROADER * nodes * ratio))
        return _Round(context, gamma, nodes, side, steps, *self._start(side))

    def _translated(self, each: _Round) -> Translation:
        """The draft in the target's tokens, or that of another text if the target's tokens do not fit the first."""
        said = self._translate(each, each.owed, each.draft)
        return said if said.natural or each.first is not None else self._alternative(each) or said

    def _side(self, context: Context) -> _DraftSide:
        found: _DraftSide | None = context.memory.get(self.name)
        if found is None:
            mirror = Mirror(self._own, self._prefix)
            params = SamplingParams(temperature=0.0, tree=context.params.builder)
            inner = Context(context.id, mirror.tokens, params, "greedy", context.noise, self._stop_ids)
            inner.shares = context.shares
            found = context.memory[self.name] = _DraftSide(inner, mirror)
        return found

    def _update(self, context: Context) -> _DraftSide:
        """Bring the draft model's text up to date."""
        side = self._side(context)
        fresh = context.tokens[side.seen :]
        said = self._target.bytes_of(fresh)
        same = side.mirror.grow(said)
        share = max(len(fresh) / RATIO_MEMORY, len(fresh) / len(context.tokens))
        if fresh:
            side.size += min(1.0, share) * (len(said) / len(fresh) - side.size)
        side.seen = len(context.tokens)
        side.tail = self._target.tail(context.tokens[-TAIL:])
        room = self.model.max_context
        if len(side.mirror.tokens) > room * 3 // 4:
            side.mirror.forget(len(side.mirror.tokens) - room // 2)
            same = 0
        self._inner.rewind(side.inner, same)
        return side

    def _ratio(self, side: _DraftSide) -> float:
        """Draft tokens that are about as long as one of the target's."""
        mirror = side.mirror
        count = min(RATIO_MEMORY, len(mirror.tokens) - mirror.start)
        own = self._own.bytes_of(mirror.tokens[-count:]) if count else b""
        return side.size * count / len(own) if own and side.size else 1.0

    def _start(self, side: _DraftSide) -> tuple[Context, bytes, Draft | None]:
        """Where the draft model starts to generate: ``inner``, ``owed`` and ``first`` of ``_Round``.

        The committed text may end inside a word or a character, where no token of the draft model ends. The draft model
        then starts before its last tokens and chooses among the longer tokens that begin with their text: for "the lit"
        it reads "the" and may choose " little".
        """
        inner, owed = side.inner, side.mirror.pending
        for count, said in reversed(self._last(side)):
            longer = self._own.longer(said)
            if not longer or count == len(inner.tokens):
                continue
            last = inner.tokens[len(inner.tokens) - count :]
            params = replace(inner.params, logits_processors=(_among([*longer, *last[:1]]),))
            shorter = replace(inner, tokens=inner.tokens[: len(inner.tokens) - count], params=params, memory={})
            first = self._elsewhere(inner, shorter, 1)
            token = first.tree.tokens[0] if len(first) else -1
            if token not in longer:
                break
            if not continuation(self._target, side.tail, self._own.piece(token)[len(said) :]).natural:
                break
            other = replace(inner, tokens=[*shorter.tokens, token], memory={})
            self._inner.move(inner, other, len(shorter.tokens))
            return other, said, first
        return inner, owed, None

    def _last(self, side: _DraftSide) -> list[tuple[int, bytes]]:
        """(count, text) of the draft's last tokens, as long as some token may begin with that text and be longer."""
        tokens, said = side.inner.tokens, side.mirror.pending
        found = [(0, said)] if said else []
        for count in range(1, min(WITHIN, len(tokens) - side.mirror.start) + 1):
            piece = self._own.piece(tokens[-count])
            # Usually no token has both bytes, and no list has to be searched.
            if not piece or (said and self._own.borders.apart(piece[-1], said[0])):
                break
            said = piece + said
            found.append((count, said))
        return found

    def _translate(self, each: _Round, owed: bytes, draft: Draft) -> Translation:
        """The draft's text in tokens of the target, without the bytes that are committed already."""
        context, chain = each.context, each.nodes <= each.depth
        nodes, worth = (each.depth, None) if chain else (each.nodes, context.worth)
        ends = self._end in context.stop_ids
        return self._translator.translate(each.side.tail, owed, draft, each.depth, nodes, ends=ends, worth=worth)

    def _alternative(self, each: _Round) -> Translation | None:
        """Another text, where the target's tokens do not fit the first.

        After the target's token "▁s" an "o" is unlikely, since there is a token "▁so". The draft model does not see the
        target's tokens, so it is asked for its next best first token and continues from there.
        """
        side, inner = each.side, each.side.inner
        tried = [each.draft.tree.tokens[node] for node in each.draft.tree.children(-1)]
        for _ in range(TRIES):
            params = replace(inner.params, logit_bias=dict.fromkeys(tried, BANNED))
            first = self._elsewhere(inner, replace(inner, params=params, memory={}, nodes=1), 1)
            if not first.draws:
                return None
            token = first.tree.tokens[0]
            tried.append(token)
            if continuation(self._target, side.tail, self._own.piece(token)).natural:
                longer = replace(inner, tokens=[*inner.tokens, token], memory={})
                rest = self._elsewhere(inner, longer, max(each.steps - 1, 1))
                said = self._translate(each, side.mirror.pending, _joined(first, rest))
                if said.natural:
                    return said
        return None

    def _elsewhere(self, inner: Context, other: Context, steps: int) -> Draft:
        """What the draft model proposes in another context than the request's own, in the same slot of its cache."""
        if steps == 1:
            other.nodes = 1
        shared = min(len(inner.tokens), len(other.tokens))
        self._inner.move(inner, other, shared)
        try:
            return self._ask([other], [steps])[0]
        finally:
            self._inner.move(other, inner, shared)

    def _ask(self, inners: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        """The draft model's own proposals of these depths, with as many nodes as their contexts allow."""
        began = time.perf_counter()
        drafts = self._inner.propose(inners, depths) if inners else []
        self._asked += time.perf_counter() - began
        return drafts
