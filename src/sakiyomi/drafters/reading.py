"""One request's draft while a model reads it: from rows of logits to candidates, and from these to a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.trees import Builder, Growth
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.sampling.probs import best, best_token, leading
from sakiyomi.sampling.rows import Row, draw_distinct, top_tokens
from sakiyomi.sampling.sampler import Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.drafters.draft_length import TokenValue

__all__ = ["DraftTreeState", "RequestMemory"]

_Listed = tuple[list[int], list[float]]


@dataclass(eq=False, slots=True)
class DraftTreeState:
    """The draft of one request while it grows.

    Attributes:
        context, sampler: of the request.
        name: of the drafter; its stream of uniforms goes by it.
        growth, builder: the tree, and who decides its shape.
        confidence: makes chances of scores.
        drawn: candidates are drawn, and not chosen: then nothing may be dropped for what it is.
        slot: the request's place in the model's cache.
        held: committed tokens whose keys and values lay there when the reading began.
        rows: candidates that were read, in the order of their rows in the cache.
        fresh: candidates to be read in the next pass.
        listed: of each place that was read the number of its first candidate, and all tokens that were listed with
            their scores.
    """

    context: Context
    sampler: Sampler
    name: str
    growth: Growth
    builder: Builder
    confidence: Confidence
    drawn: bool
    slot: int
    held: int
    rows: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    listed: dict[int, tuple[int, list[int], list[float]]] = field(default_factory=dict)
    _probs: list[float | None] = field(default_factory=list)  # the draft's, of each candidate
    _drawn_from: list[Row] = field(default_factory=list)
    _row_of: dict[int, int] = field(default_factory=dict)
    _first: int = field(init=False)  # position of the tokens of the first level

    def __post_init__(self) -> None:
        self._first = len(self.context.tokens)

    @property
    def worth(self) -> TokenValue | None:
        """What a token is worth, where the size is a matter of that and of the candidates' own chances."""
        return None if self.drawn else self.context.worth

    @property
    def columns(self) -> int:
        """Columns of the slot that are taken after the next pass."""
        return self._first + len(self.rows) + len(self.fresh)

    def segment(self) -> SequenceRows:
        """The rows of the next pass: first the committed tokens that are missing, then a level a pass."""
        growth, done = self.growth, len(self.rows)
        if not growth.levels:
            return SequenceRows(self.slot, self.held, self.context.tokens[self.held :])
        rows = {candidate: row for row, candidate in enumerate((*self.rows, *self.fresh))}
        parents = tuple(rows.get(growth.parents[candidate], -1) for candidate in rows)
        tokens = [growth.tokens[candidate] for candidate in self.fresh]
        return SequenceRows(self.slot, self._first + done, tokens, parents, done=done)

    def settle(self, tokens: Sequence[int]) -> list[int]:
        """Learn from what the target chose at every place that it came to.

        Args:
            tokens: the committed ones by now.

        Returns:
            Rows of the path that was accepted, but for the last committed token: its logits are still wanted.
        """
        rows = {candidate: row for row, candidate in enumerate(self.rows)}
        first, place = self._first, -1
        path: list[int] = []
        for position in range(first, len(tokens)):
            if place not in self.listed:
                break
            start, listed, scores = self.listed[place]
            rank = listed.index(tokens[position]) if tokens[position] in listed else None
            self.sureness(position - first).learn(scores, rank)
            place = start + rank if rank is not None else len(self.growth.tokens)
            if place in rows and len(path) == position - first and position < len(tokens) - 1:
                path.append(rows[place])
        return path

    def advance(self, places: Sequence[int], logits: Tensor) -> None:
        """Take a pass in: candidates behind these places, one level deeper, and which of them to read next.

        Args:
            places: as for ``read``.
            logits: (places, V of the target) of the draft.
        """
        growth, sampler = self.growth, self.sampler
        self.fresh = []
        growth.begin_level()
        edited = logits
        if sampler.edits:
            try:
                edited = sampler.process(logits, [self._path(place) for place in places], self.context.tokens)
            except Exception:
                # The user's own processor. If the target comes to such a text too, this request ends there.
                return
        try:
            for place, row, ranked in zip(places, edited, self._ranked(places, edited), strict=True):
                self.read(place, row, ranked)
        except InputError:
            if not sampler.edits or bool(logits.isnan().any()):
                raise  # the draft model's own numbers
            return  # the request's options leave no token here
        if growth.levels < growth.depth:
            stops = self.context.stop_ids
            self.fresh = [c for c in self.builder.expand(growth) if growth.tokens[c] not in stops]

    def _ranked(self, places: Sequence[int], logits: Tensor) -> Sequence[_Listed | None]:
        """The likeliest tokens of every place in one call, where they are the candidates and there are many places."""
        if len(places) < 2 or self.sampler.edits or self.context.rule != "greedy":
            return [None] * len(places)
        count = max(self.wanted(place) for place in places)
        return leading(logits, count) if count > 1 else [None] * len(places)

    def read(self, place: int, logits: Tensor, ranked: _Listed | None = None) -> None:
        """Offer the candidates of a place.

        Args:
            place: candidate that was read, -1 for the last committed token.
            logits: (V of the target,) of the draft, as the request's options change them.
            ranked: the likeliest tokens, as ``leading`` gives them, where they are known.
        """
        growth = self.growth
        count = self.wanted(place)
        if not count:
            return
        if ranked is not None:
            tokens, scores = ranked[0][:count], ranked[1][:count]
            probs: list[float | None] = [math.exp(score) for score in scores]
        else:
            tokens, probs, scores = self._candidates(place, logits, count, self._first + growth.levels - 1)
        chances = (
            self.sureness(growth.levels - 1).chances(scores)
            if len(scores) > 1
            else [0.5 if probs[0] is None else probs[0]]
        )
        self.listed[place] = (len(growth.tokens), tokens, scores)
        self._probs.extend(probs[: growth.offer(place, tokens, chances)])

    def wanted(self, place: int) -> int:
        """How many candidates a place should have."""
        return self.builder.wanted(self.growth, place)

    def sureness(self, level: int) -> Confidence:
        """What makes chances of the scores of a level's candidates; 0 is the first level."""
        return self.confidence

    def draft(self) -> Draft:
        """What is proposed."""
        growth, worth = self.growth, self.worth
        chosen = self.builder.chosen(growth)
        if worth is not None:
            chosen = chosen[: worth.size([growth.values[candidate] for candidate in chosen])]
        chosen.sort()
        tree = TokenTree(tuple(growth.tokens), tuple(growth.parents)).keep(chosen)
        draws = tuple(
            Draw(
                node,
                self.name,
                self._row_of.get(growth.parents[candidate]),
                self._probs[candidate],
                growth.chances[candidate],
            )
            for node, candidate in enumerate(chosen)
        )
        kind: DraftKind = "point_mass"
        if self.drawn:
            kind = "chain" if tree.is_chain else "without_replacement"
        return Draft(tree, kind, draws, torch.from_numpy(np.stack(self._drawn_from)) if self._drawn_from else None)

    def _path(self, candidate: int) -> list[int]:
        """Tokens from the root down to a candidate."""
        tokens: list[int] = []
        while candidate >= 0:
            tokens.append(self.growth.tokens[candidate])
            candidate = self.growth.parents[candidate]
        return tokens[::-1]

    def _candidates(
        self, place: int, logits: Tensor, count: int, position: int
    ) -> tuple[list[int], list[float | None], list[float]]:
        """(tokens, the draft's probabilities, scores) of a place, the likeliest or the first drawn first."""
        context = self.context
        if context.rule == "greedy":
            if count == 1:
                # Its probability as the target's in traces, at temperature 1. An accelerator is not asked for it.
                token, prob = best(logits) if logits.is_cpu else (best_token(logits), None)
                return [token], [prob], [0.0]
            tokens, scores = leading(logits[None], count)[0]
            return tokens, [math.exp(score) for score in scores], scores
        probs = np.empty(logits.shape[0], np.float32)
        support = self.sampler.fill(logits, probs)
        if context.rule == "coupled":
            tokens, scores = context.noise.ranked(position, probs, count, support)
        else:
            if self.drawn:
                tokens = draw_distinct(probs, count, context.noise.fork(self.name).uniform, support)
                self._row_of[place] = len(self._drawn_from)
                self._drawn_from.append(probs)
            else:
                tokens = [token for token in top_tokens(probs, count) if probs[token] > 0.0]
            scores = [math.log(probs[token]) for token in tokens]
        return tokens, [float(probs[token]) for token in tokens], scores


@dataclass(eq=False, slots=True)
class RequestMemory:
    """What a drafter keeps of a request: its sampler, and the tree that was grown last, to learn from."""

    sampler: Sampler
    tree: DraftTreeState | None = None

    @classmethod
    def of(cls, context: Context, name: str, vocab_size: int) -> Self:
        """That of a request, where there was none a new one; what the target made of its last tree is learnt.

        Args:
            context: of the request.
            name: of the drafter.
            vocab_size: width of the logits that its sampler reads.
        """
        found: Self | None = context.memory.get(name)
        if found is None:
            found = context.memory[name] = cls(Sampler(context.params, vocab_size))
        if found.tree is not None:
            found.tree.settle(context.tokens)
            found.tree = None
        return found
