"""The draft of one request while it grows: logits become candidates, and candidates become a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.draft_length import TokenValue, shares
from sakiyomi.drafters.trees import Builder, CandidateTree
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.sampling.probs import best, best_token, leading
from sakiyomi.sampling.rows import Row, draw_distinct, top_tokens
from sakiyomi.sampling.sampler import Sampler

_Listed = tuple[list[int], list[float]]


class TreePlan(NamedTuple):
    """What a tree is to become.

    Attributes:
        tree: without a level.
        builder: decides its shape.
        worth: what a token is worth, where that is weighed.
        levels: what turns the scores of each level's candidates into chances; one: of all.
        breadth: most candidates of a place, where nodes are picked; None: as many as the builder wants.
    """

    tree: CandidateTree
    builder: Builder
    worth: TokenValue | None
    levels: Sequence[Confidence]
    breadth: int | None = None

    def candidate_count(self, place: int) -> int:
        """How many children a place should have."""
        count = self.builder.candidate_count(self.tree, place)
        return count if self.breadth is None or not self.builder.picks else min(count, self.breadth)


@dataclass(eq=False, slots=True)
class DraftTreeState:
    """The draft of one request while it grows.

    Attributes:
        context, sampler: of the request.
        name: of the drafter; it names the stream of uniforms that candidates are drawn with.
        plan: what the tree is to become.
        drawn: whether candidates are drawn rather than chosen. Then none may be dropped because of its token.
        slot: of the request in the model's cache.
        held: committed tokens whose keys and values were in that slot at the beginning.
        lead: the first so many tokens of the text have no row in that slot.
        given: hidden states of the target that the missing tokens read beside themselves, (missing, hidden); empty
            where the model reads tokens alone.
        rows: candidates that the model has read, in the order of their rows in the cache.
        unread: candidates that the model reads in the next pass.
        listed: for each candidate that was read (-1: the last committed token) the number of its first child, and all
            tokens that were listed as children, with their scores.
        candidates, builder, worth: of the plan.
        first: position of the tokens of the first level.
    """

    context: Context
    sampler: Sampler
    name: str
    plan: TreePlan
    drawn: bool
    slot: int
    held: int
    rows: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    listed: dict[int, tuple[int, Sequence[int], Sequence[float]]] = field(default_factory=dict)
    _probs: list[float | None] = field(default_factory=list)  # the draft's, of each candidate
    _drawn_from: list[Row] = field(default_factory=list)
    _table: Tensor | None = None  # all of them, where they lie together
    _row_of: dict[int, int] = field(default_factory=dict)
    candidates: CandidateTree = field(init=False)
    builder: Builder = field(init=False)
    worth: TokenValue | None = field(init=False)
    first: int = field(init=False)
    lead: int = 0
    given: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self.first = len(self.context.tokens)
        self.candidates, self.builder, self.worth = self.plan.tree, self.plan.builder, self.plan.worth

    @property
    def columns(self) -> int:
        """Columns of the slot that are in use after the next pass."""
        return self.first - self.lead + len(self.rows) + len(self.unread)

    def drew(self, probs: Sequence[float], table: Tensor | None) -> None:
        """Set the draft's probabilities of all candidates, and a distribution for each place."""
        self._probs, self._table = list(probs), table
        if table is not None:
            self._row_of = dict(zip(self.listed, range(len(table)), strict=True))

    def segment(self) -> SequenceRows:
        """The rows of the next pass: in the first pass the committed tokens that are missing, then one level each."""
        candidates, done = self.candidates, len(self.rows)
        if not candidates.levels:
            return SequenceRows(self.slot, self.held - self.lead, self.context.tokens[self.held :])
        rows = {candidate: row for row, candidate in enumerate((*self.rows, *self.unread))}
        parents = tuple(rows.get(candidates.parents[candidate], -1) for candidate in rows)
        tokens = [candidates.tokens[candidate] for candidate in self.unread]
        return SequenceRows(self.slot, self.first - self.lead + done, tokens, parents, done=done)

    def learn(self, tokens: Sequence[int]) -> list[int]:
        """Learn from what the target chose at every node that it reached.

        Args:
            tokens: all tokens that are committed by now.

        Returns:
            Rows of the accepted path, without the last committed token, whose logits are still wanted.
        """
        rows = dict(zip(self.rows, range(len(self.rows)), strict=True))
        first, place = self.first, -1
        path: list[int] = []
        for position in range(first, len(tokens)):
            if place not in self.listed:
                break
            start, listed, scores = self.listed[place]
            rank = listed.index(tokens[position]) if tokens[position] in listed else None
            self.confidence_at(position - first).learn(scores, rank)
            above, place = place, len(self.candidates.tokens) if rank is None else start + rank
            if place >= len(self.candidates.parents) or self.candidates.parents[place] != above:
                break  # what the target chose is no candidate
            if place in rows and len(path) == position - first and position < len(tokens) - 1:
                path.append(rows[place])
        return path

    def advance(self, places: Sequence[int], logits: Tensor) -> None:
        """Add a level from the logits of a pass, and decide which of its candidates to read next.

        Args:
            places: the candidates that were read, -1 for the last committed token.
            logits: (places, V of the target) of the draft model.
        """
        candidates, sampler = self.candidates, self.sampler
        self.unread = []
        candidates.begin_level()
        edited = logits
        if sampler.edits:
            try:
                edited = sampler.process(logits, [self._path(place) for place in places], self.context.tokens)
            except Exception:
                # The user's processor raised. If the target also gets to this text, the error ends the request.
                return
        try:
            for place, row, ranked in zip(places, edited, self._ranked(places, edited), strict=True):
                self.read(place, row, ranked)
        except InputError:
            if not sampler.edits or bool(logits.isnan().any()):
                raise  # the draft model computes no numbers
            return  # the request's options leave no token
        if candidates.levels < candidates.depth:
            stops = self.context.stop_ids
            self.unread = [c for c in self.builder.expand(candidates) if candidates.tokens[c] not in stops]

    def _ranked(self, places: Sequence[int], logits: Tensor) -> Sequence[_Listed | None]:
        """The likeliest tokens after every place in one call, where these are the candidates; else None for each."""
        if len(places) < 2 or self.sampler.edits or self.context.rule != "greedy":
            return [None] * len(places)
        count = max(self.candidate_count(place) for place in places)
        return leading(logits, count) if count > 1 else [None] * len(places)

    def read(self, place: int, logits: Tensor, ranked: _Listed | None = None) -> None:
        """Add the children of a place.

        Args:
            place: the candidate that was read, -1 for the last committed token.
            logits: (V of the target,) of the draft model, as the request's options change them.
            ranked: the likeliest tokens, as ``leading`` gives them, where they are known.
        """
        candidates = self.candidates
        count = self.candidate_count(place)
        if not count:
            return
        if ranked is not None:
            tokens, scores = ranked[0][:count], ranked[1][:count]
            probs: list[float | None] = [math.exp(score) for score in scores]
        else:
            tokens, probs, scores = self._candidates(place, logits, count, self.first + candidates.levels - 1)
        chances = self.chances(candidates.levels - 1, probs, scores)
        self.listed[place] = (len(candidates.tokens), tokens, scores)
        self._probs.extend(probs[: candidates.offer(place, tokens, chances)])

    def chances(self, level: int, probs: Sequence[float | None], scores: Sequence[float]) -> list[float]:
        """Chances of a place's candidates, the largest first, from their probabilities and scores."""
        if len(scores) == 1:
            return [0.5 if probs[0] is None else min(1.0, probs[0])]
        if self.builder.calibrated:
            return self.confidence_at(level).chances(scores)
        weights = [math.exp(score - scores[0]) for score in scores]
        share = min(1.0, sum(prob or 0.0 for prob in probs) / sum(weights))  # rounded, it may be more
        return [weight * share for weight in weights]

    def candidate_count(self, place: int) -> int:
        """How many children a place should have."""
        return self.plan.candidate_count(place)

    def confidence_at(self, level: int) -> Confidence:
        """What turns the scores of a level's candidates into chances; 0 is the first level."""
        levels = self.plan.levels
        return levels[level if len(levels) > 1 else 0]

    def draft(self, chosen: list[int]) -> Draft:
        """The proposal, of candidates that are chosen: see ``drafts_of``."""
        candidates = self.candidates
        tree = TokenTree(tuple(candidates.tokens), tuple(candidates.parents))
        count, rows = len(chosen), map(self._row_of.get, candidates.parents)
        if count == len(tree.tokens):
            draws = Draw.many(range(count), self.name, rows, self._probs, candidates.chances)
        else:
            chosen.sort()
            tree, rows_of = tree.keep(chosen), list(rows)
            probs, chances = ([column[each] for each in chosen] for column in (self._probs, candidates.chances))
            draws = Draw.many(range(count), self.name, [rows_of[each] for each in chosen], probs, chances)
        kind: DraftKind = "point_mass"
        if self.drawn:
            kind = "chain" if tree.is_chain else "without_replacement"
        if self._drawn_from:
            self._table = torch.from_numpy(np.stack(self._drawn_from))
        return Draft(tree, kind, draws, self._table, sound=True)

    def _path(self, candidate: int) -> list[int]:
        """Tokens from the root down to a candidate."""
        return [self.candidates.tokens[each] for each in self.candidates.path(candidate)]

    def _candidates(
        self, place: int, logits: Tensor, count: int, position: int
    ) -> tuple[list[int], list[float | None], list[float]]:
        """(tokens, probabilities, scores) of a place's children: the likeliest, or the first drawn, comes first."""
        context = self.context
        if context.rule == "greedy":
            if count == 1:
                # Traces show its probability at temperature 1, as for the target's tokens. On an accelerator that would
                # need another read-back.
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


def drafts_of(states: Sequence[DraftTreeState]) -> list[Draft]:
    """The proposals of complete trees: all nodes that their builders choose. Trees whose tokens are weighed keep only
    the nodes that are worth their rows of the shared pass.
    """
    orders = [state.builder.chosen(state.candidates) for state in states]
    worths = [state.worth for state in states if state.worth is not None]
    if worths:
        weighed = [i for i, state in enumerate(states) if state.worth is not None]
        values = [[states[i].candidates.values[candidate] for candidate in orders[i]] for i in weighed]
        others = sum(len(order) for order, state in zip(orders, states, strict=True) if state.worth is None)
        for i, count in zip(weighed, shares(worths, values, others), strict=True):
            del orders[i][count:]
    return [state.draft(order) for state, order in zip(states, orders, strict=True)]


@dataclass(eq=False, slots=True)
class RequestMemory:
    """What a drafter keeps of a request: its sampler, and its last tree, from which it learns."""

    sampler: Sampler
    tree: DraftTreeState | None = None

    @classmethod
    def of(cls, context: Context, name: str, vocab_size: int) -> Self:
        """The memory of a request, made if it has none. It learns what the target accepted of the last tree.

        Args:
            context: of the request.
            name: of the drafter.
            vocab_size: width of the logits that its sampler reads.
        """
        found: Self | None = context.memory.get(name)
        if found is None:
            found = context.memory[name] = cls(Sampler(context.params, vocab_size))
        if found.tree is not None:
            found.tree.learn(context.tokens)
            found.tree = None
        return found
