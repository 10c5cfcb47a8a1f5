"""Drafts with a model that has another tokenizer than the target: its text is proposed in the target's tokens.

``Mirror`` keeps each request's committed text in the draft's tokens. The draft model generates some tokens behind it,
and ``Translator`` converts them to tokens of the target. They are proposed as point masses, which every lossless
acceptance rule can verify.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
class _Request:
    """One request as the draft model sees it.

    Attributes:
        inner: the draft model's own context; its tokens are the mirror's.
        mirror: the committed text in tokens of the draft model.
        seen: committed tokens of the target that are in it.
        size: mean bytes of a token of the target, of late.
        tail: the last committed bytes.
        depth: levels wanted in this round, in tokens of the target.
        nodes: nodes wanted; if there are not more than ``depth``, a chain.
        steps: levels of the draft model's own tree.
    """

    inner: Context
    mirror: Mirror
    seen: int = 0
    size: float = 0.0
    tail: bytes = b""
    depth: int = 0
    nodes: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Start:
    """Where the draft model starts to write.

    Attributes:
        inner: its context there.
        owed: committed bytes with which its text has to begin.
        first: its first token, where that is in the context already.
    """

    inner: Context
    owed: bytes
    first: Draft | None = None


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

    The draft model proposes its most probable text, also when the target samples: the coupled rule's noise belongs to
    tokens of one vocabulary. So drafts are point masses, accepted with the target's probability of each token.

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
        before: _Request | None = earlier.memory.pop(self.name, None)
        if before is not None:
            self._inner.inherit(self._request(context).inner, before.inner)

    def end(self, context: Context) -> None:
        """Free the request's slot."""
        request: _Request | None = context.memory.pop(self.name, None)
        if request is not None:
            self._inner.end(request.inner)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass of the draft model for each level."""
        began, asked = time.perf_counter(), self._asked
        requests = [self._update(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]
        starts = [self._start(request) for request in requests]
        # Without a begin token and before any text the draft model has nothing to continue.
        ready = [i for i, start in enumerate(starts) if start.inner.tokens]
        found = [Draft.empty()] * len(contexts)
        drafts = self._ask([starts[i].inner for i in ready], [requests[i].steps for i in ready])
        for i, draft in zip(ready, drafts, strict=True):
            start, inner = starts[i], requests[i].inner
            if start.first is not None:
                self._inner.move(start.inner, inner, len(start.inner.tokens) - 1)
                draft = _joined(start.first, draft)
            said = self._translate(requests[i], contexts[i], start.owed, draft)
            if not said.natural and start.first is None:
                said = self._alternative(requests[i], contexts[i], draft) or said
            found[i] = said.draft(self.name)
        self.alignment_seconds += time.perf_counter() - began - (self._asked - asked)
        return found

    def _request(self, context: Context) -> _Request:
        found: _Request | None = context.memory.get(self.name)
        if found is None:
            mirror = Mirror(self._own, self._prefix)
            params = SamplingParams(temperature=0.0, tree=context.params.builder)
            inner = Context(context.id, mirror.tokens, params, "greedy", context.noise, self._stop_ids)
            inner.shares = context.shares
            found = context.memory[self.name] = _Request(inner, mirror)
        return found

    def _update(self, context: Context, gamma: int) -> _Request:
        """Bring the draft model's text up to date, and set the size of its tree."""
        request = self._request(context)
        inner, mirror, fresh = request.inner, request.mirror, context.tokens[request.seen :]
        said = self._target.bytes_of(fresh)
        same = mirror.grow(said)
        share = max(len(fresh) / RATIO_MEMORY, len(fresh) / len(context.tokens))
        if fresh:
            request.size += min(1.0, share) * (len(said) / len(fresh) - request.size)
        request.seen = len(context.tokens)
        request.tail = self._target.tail(context.tokens[-TAIL:])
        room = self.model.max_context
        if len(mirror.tokens) > room * 3 // 4:
            mirror.forget(len(mirror.tokens) - room // 2)
            same = 0
        self._inner.rewind(inner, same)
        nodes = context.nodes if inner.params.tree != "chain" else gamma
        request.depth, request.nodes = gamma, nodes if context.worth is None else min(nodes, WIDEST)
        ratio = self._ratio(request)
        request.steps = max(1, math.ceil((gamma + SETTLING) * ratio))
        broad = max(request.steps, math.ceil(BROADER * request.nodes * ratio))
        inner.nodes = request.steps if request.nodes <= gamma else broad
        return request

    def _ratio(self, request: _Request) -> float:
        """Draft tokens that are about as long as one of the target's."""
        mirror = request.mirror
        count = min(RATIO_MEMORY, len(mirror.tokens) - mirror.start)
        own = self._own.bytes_of(mirror.tokens[-count:]) if count else b""
        return request.size * count / len(own) if own and request.size else 1.0

    def _start(self, request: _Request) -> _Start:
        """Where the draft model starts to write.

        The committed text may end inside a word or a character, where no token of the draft model ends. The draft model
        then starts before its last tokens and chooses among the longer tokens that begin with their text: for "the lit"
        it reads "the" and may choose " little".
        """
        inner = request.inner
        for count, said in reversed(self._last(request)):
            longer = self._own.longer(said)
            if not longer or count == len(inner.tokens):
                continue
            left = len(inner.tokens) - count
            params = replace(inner.params, logits_processors=(_among([*longer, *inner.tokens[left : left + 1]]),))
            first = self._elsewhere(inner, inner.tokens[:left], 1, params)
            token = first.tree.tokens[0] if len(first) else -1
            if token not in longer or not self._fits(request, token, len(said)):
                break
            other = replace(inner, tokens=[*inner.tokens[:left], token], memory={})
            self._inner.move(inner, other, left)
            return _Start(other, said, first)
        return _Start(inner, request.mirror.pending)

    def _last(self, request: _Request) -> list[tuple[int, bytes]]:
        """(count, text) of the draft's last tokens, as long as some token may begin with that text and be longer."""
        tokens, said = request.inner.tokens, request.mirror.pending
        found = [(0, said)] if said else []
        for count in range(1, min(WITHIN, len(tokens) - request.mirror.start) + 1):
            piece = self._own.piece(tokens[-count])
            # Usually no token has both bytes, and no list has to be searched.
            if not piece or (said and self._own.borders.apart(piece[-1], said[0])):
                break
            said = piece + said
            found.append((count, said))
        return found

    def _fits(self, request: _Request, token: int, said: int = 0) -> bool:
        """Whether the target's tokenizer also ends a token before what this one adds to the text.

        Args:
            request: whose text it continues.
            token: of the draft model.
            said: bytes of it that are committed already.
        """
        return continuation(self._target, request.tail, self._own.piece(token)[said:]).natural

    def _translate(self, request: _Request, context: Context, owed: bytes, draft: Draft) -> Translation:
        """The draft's text in tokens of the target, without the bytes that are committed already."""
        depth, chain = request.depth, request.nodes <= request.depth
        nodes, worth = (depth, None) if chain else (request.nodes, context.worth)
        ends = self._end in context.stop_ids
        return self._translator.translate(request.tail, owed, draft, depth, nodes, ends=ends, worth=worth)

    def _alternative(self, request: _Request, context: Context, draft: Draft) -> Translation | None:
        """Another text, where the target's tokens do not fit the first.

        After the target's token "▁s" an "o" is unlikely, since there is a token "▁so". The draft model does not see the
        target's tokens, so it is asked for its next best first token and continues from there.
        """
        inner = request.inner
        tried = [draft.tree.tokens[node] for node in draft.tree.children(-1)]
        for _ in range(TRIES):
            params = replace(inner.params, logit_bias=dict.fromkeys(tried, BANNED))
            first = self._elsewhere(inner, inner.tokens, 1, params)
            if not first.draws:
                return None
            token = first.tree.tokens[0]
            tried.append(token)
            if self._fits(request, token):
                rest = self._elsewhere(inner, [*inner.tokens, token], max(request.steps - 1, 1), inner.params)
                said = self._translate(request, context, request.mirror.pending, _joined(first, rest))
                if said.natural:
                    return said
        return None

    def _elsewhere(self, inner: Context, tokens: list[int], steps: int, params: SamplingParams) -> Draft:
        """What the draft model proposes behind other tokens than the request's own, in the same slot of its cache."""
        other = replace(inner, tokens=tokens, params=params, memory={}, nodes=1 if steps == 1 else inner.nodes)
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
