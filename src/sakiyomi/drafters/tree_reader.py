"""Grows the trees of several requests together, one level a pass, with a draft model or the target's first layers.

Drafters decide which cache is used, and what happens to its rows afterwards.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.running_mean import running_mean
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context, Drafter, Rule
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.draft_tree_state import DraftTreeState, TreePlan, drafts_of
from sakiyomi.drafters.head_model import over_vocabulary
from sakiyomi.drafters.native_trees import FOLLOWED, NativeTrees
from sakiyomi.drafters.trees import BUILDERS, Builder, CandidateTree, Ranks
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.kernel_rounds import NOTHING, FedRows
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.sampler import Sampler

DRAWN: dict[str, DraftKind] = {"chain": "chain", "static": "without_replacement", "choices": "without_replacement"}
"""Kind of draft for each shape that is known in advance; only these are drawn for the ratio rule."""
# Initial sharpness of acceptance compared to the draft's own softmax, by rule.
SHARPNESS = {"greedy": 2.0, "coupled": 1.4, "ratio": 1.0}


def kind_of(params: SamplingParams, levels: int | None = None) -> DraftKind:
    """The kind of draft for a request that is sampled by the ratio rule, by the shape that it asked for.

    Args:
        params: of the request.
        levels: most levels of a tree; None: any number.

    Raises:
        InputError: a deeper tree was asked for.
    """
    if levels is not None and (deepest := max(map(len, params.choices), default=0)) > levels:
        raise InputError(f"tree has {deepest} levels, and this draft guesses {levels} tokens")
    return DRAWN.get(params.builder, "point_mass")


def is_drawn(context: Context) -> bool:
    """Whether a request's candidates are drawn rather than chosen."""
    return context.rule == "ratio" and context.params.builder in DRAWN


def begin_tree(context: Context, depth: int, nodes: int, ranks: Callable[[], Ranks]) -> tuple[CandidateTree, Builder]:
    """A tree without candidates, and the builder that decides its shape.

    Args:
        context: of the request.
        depth, nodes: at most; a chain has as many nodes as levels.
        ranks: gives the acceptance by rank so far, see ``BUILDERS``.
    """
    shape, worth = context.params.builder, context.worth
    candidates = CandidateTree(depth, depth if shape == "chain" else nodes)
    builder = BUILDERS[shape](context.params, ranks)
    if builder.picks and worth is not None:
        candidates.floor = worth.floor(candidates.nodes)
    return candidates, builder


class TreeReader:
    """Grows trees and chains from a model's logits, one level a pass.

    Under the rule "greedy" candidates are the model's most probable tokens, under "coupled" those with the largest
    log q + noise of the position. Under "ratio" the candidates of a chain or a static tree are drawn from the model's
    distribution, after the same temperature and truncation as the target's, and the distribution is kept; the
    candidates of other trees, whose nodes are chosen afterwards, are its most probable tokens.

    Args:
        model: the draft model.
        vocab_size: of the target; the model's may be padded differently.
        fed: how the kernels run passes whose rows read hidden states; None: they do not.

    Attributes:
        state: what a tree is while it grows.
        one_pass: all levels come in one pass.
        levels: most levels of a tree; None: any number.
        passes: passes so far.
        confidence: by rule, how often the model is right where it gives such probabilities.
        besides: seconds of a level outside the model.
    """

    state: type[DraftTreeState] = DraftTreeState
    one_pass = False
    levels: int | None = None

    def __init__(self, model: ModelRunner, vocab_size: int, fed: FedRows | None = None) -> None:
        self.model = model
        self.passes = 0
        self.confidence = {rule: Confidence(sharpness) for rule, sharpness in SHARPNESS.items()}
        self._vocab_size = vocab_size
        self._native = NativeTrees(model, vocab_size, fed)
        self.besides = 1e-4

    def begin(
        self, context: Context, sampler: Sampler, name: str, gamma: int, slot: int, held: int
    ) -> DraftTreeState | None:
        """A tree without a level; None: the model's context, shorter than the target's, ends here.

        Args:
            context: of the request.
            sampler: of the request, for the model's logits.
            name: of the drafter.
            gamma: depth wanted.
            slot: of the request in the model's cache.
            held: committed tokens whose keys and values are there; at least one is missing.
        """
        plan = self.plan(context, gamma)
        if plan is None:
            return None
        return self.state(context, sampler, name, plan, is_drawn(context), slot, held)

    def plan(self, context: Context, gamma: int) -> TreePlan | None:
        """What a request's tree is to become, `gamma` levels wanted; None: the model's context ends here."""
        worth = None if is_drawn(context) else context.worth
        depth = min(gamma if worth is None else worth.depth, self.model.max_context - len(context.tokens))
        if depth < 1:
            return None
        confidence = self.confidence[context.rule]
        tree, builder = begin_tree(context, depth, context.nodes, lambda: confidence.ranks)
        return TreePlan(tree, builder, worth, (confidence,))

    def learn(self, rule: Rule, places: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Learn what the target chose at each place of a tree that it came to, see ``GrowingDrafter.learn``."""
        learn = self.confidence[rule].learn
        for rank, scores in places:
            learn(scores, rank if rank >= 0 else None)

    def read(self, states: Sequence[DraftTreeState]) -> None:
        """Grow these trees until they are complete.

        Afterwards the cache holds all committed tokens, and behind them the rows of the candidates that were read. A
        tree for which memory runs out stays as it is.
        """
        began, inside, passes = time.perf_counter(), self.model.forward_seconds, self.passes
        grown = self._native.grow(states, self.besides)
        self.passes += grown or 0
        active = [state for state in states if self._has_room(state)] if grown is None else []
        while active:
            segments = [state.segment() for state in active]
            logits = self._score(active, segments)
            self.passes += 1
            row = 0
            for state, segment in zip(active, segments, strict=True):
                count = len(segment.tokens)
                self._take(state, logits[row : row + count])
                row += count
            active = [state for state in active if state.unread and self._has_room(state)]
        if self.passes > passes:
            besides = time.perf_counter() - began - (self.model.forward_seconds - inside)
            self.took(self.passes - passes, besides)

    def took(self, passes: int, besides: float) -> None:
        """Record that so many passes took so many seconds outside the model."""
        self.besides = running_mean(self.besides, besides / passes)

    def _score(self, states: Sequence[DraftTreeState], segments: Sequence[SequenceRows]) -> Tensor:
        """Logits (rows, V of the model) of a pass over these segments of the trees."""
        return self.model.score(segments).logits

    def _has_room(self, state: DraftTreeState) -> bool:
        return self.model.cache.has_room(state.slot, state.columns)

    def _take(self, state: DraftTreeState, logits: Tensor) -> None:
        """Add a level to a tree from its rows of a pass, (rows, V of the model)."""
        if not state.candidates.levels:
            places, logits = [-1], logits[-1:]
        else:
            places = state.unread
            state.rows.extend(places)
        state.advance(places, over_vocabulary(logits, None, self._vocab_size))
        if not self._pays(state, state.unread):
            state.unread = []

    def _pays(self, state: DraftTreeState, places: list[int]) -> bool:
        """Whether a pass over these candidates is worth its time."""
        if state.worth is None or not places:
            return True
        price, values = state.worth.price(state.candidates.nodes), state.candidates.values
        gain = sum(max(0.0, FOLLOWED * values[place] - price) for place in places)
        return state.worth.pays(gain, self._pass_seconds(len(places)))

    def _pass_seconds(self, rows: int) -> float:
        """Seconds of a pass over so many candidates."""
        return self.model.pass_seconds(rows) + self.besides


class GrowingDrafter(Drafter):
    """Grows a tree for each request. Subclasses decide where trees begin and how they grow.

    Where it is ``native``, rounds that the kernels run grow its trees by themselves (``engine/native_rounds.py``): they
    ask it for a seat of each request, and tell it when the request leaves them.

    Attributes:
        levels: most levels of a tree; None: any number.
        around: what the kernels run around its passes.
        ahead: columns behind the text that a pass writes, beside those of candidates.
    """

    kind: DraftKind = "chain"
    runs_model = prefers_coupled = True
    levels: int | None = None
    around = NOTHING
    ahead = 0

    @property
    def native(self) -> bool:
        """Whether the kernels may grow its trees from round to round."""
        return False

    def plan(self, context: Context, gamma: int) -> TreePlan | None:
        """What a request's tree is to become, `gamma` levels wanted; None: nothing can be drafted."""
        raise NotImplementedError

    def seats(self, contexts: Sequence[Context], most: int) -> list[Any | None]:
        """What it keeps of these requests, which lacks ``most`` tokens of their texts at most; None for requests for
        which it proposes nothing in this round.
        """
        raise NotImplementedError

    def tree(self, context: Context, seat: Any) -> DraftTreeState:
        """A tree without a level behind a request's text."""
        raise NotImplementedError

    def place(self, context: Context) -> tuple[int | None, int]:
        """A request's slot in the draft model's cache, and its tokens there; no slot where a tree's rows are needed."""
        return None, 0

    def rows(self, depth: int, missing: int) -> int:
        """Rows of a pass that guesses so many tokens of a request, of whose text so many are missing."""
        return missing

    def follow(self, context: Context, seat: Any, held: int) -> None:
        """The kernels have read so many of the request's tokens."""

    def leave(self, context: Context, seat: Any, heard: Tensor) -> None:
        """A request leaves the kernels.

        Args:
            context, seat: of the request.
            heard: what it has heard there, see ``KernelRounds.heard_by``.
        """

    def learn(self, context: Context, places: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Learn what the target chose at each place of a tree that it came to, see ``Committed``."""
        raise NotImplementedError

    def ran(self, passes: int, seconds: float, besides: float) -> None:
        """So many passes of the kernels took so many seconds, and others outside of them."""
        raise NotImplementedError

    def kind_for(self, params: SamplingParams) -> DraftKind:
        """See ``kind_of``."""
        return kind_of(params, self.levels)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; the trees of all requests grow together."""
        drafts, growing = [Draft.empty()] * len(contexts), []
        for i, (context, gamma) in enumerate(zip(contexts, gammas, strict=True)):
            if (state := self._begin(context, gamma)) is not None:
                growing.append((i, state))
        states = [state for _, state in growing]
        if states:
            self._grow(states)
        for state in states:
            self._done(state)
        for (i, _), draft in zip(growing, drafts_of(states), strict=True):
            drafts[i] = draft
        return drafts

    @abstractmethod
    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        """The request's tree, without a level yet; None: nothing can be drafted."""

    @abstractmethod
    def _grow(self, states: Sequence[Any]) -> None:
        """Complete the trees that ``_begin`` gave."""

    def _done(self, state: DraftTreeState) -> None:
        """Called for a tree that is complete; it is not called if an exception ended the passes."""


class TreeDrafter(GrowingDrafter):
    """Drafts by a reader, one pass a level.

    Args:
        reader: grows the trees.
    """

    model: ModelRunner

    def __init__(self, reader: TreeReader) -> None:
        self.reader, self.model, self.levels = reader, reader.model, reader.levels

    @property
    def forward_seconds(self) -> float:
        """See ``Drafter.forward_seconds``."""
        return self.model.forward_seconds

    @property
    def passes(self) -> int:
        """See ``Drafter.passes``."""
        return self.reader.passes

    @property
    def one_pass(self) -> bool:
        """See ``Drafter.one_pass``."""
        return self.reader.one_pass

    def plan(self, context: Context, gamma: int) -> TreePlan | None:
        """See ``GrowingDrafter``."""
        return self.reader.plan(context, gamma)

    def rows(self, depth: int, missing: int) -> int:
        """See ``GrowingDrafter``."""
        return missing + depth - 1 if self.one_pass else missing

    def learn(self, context: Context, places: Sequence[tuple[int, Sequence[float]]]) -> None:
        """See ``GrowingDrafter``."""
        self.reader.learn(context.rule, places)

    def ran(self, passes: int, seconds: float, besides: float) -> None:
        """See ``GrowingDrafter``."""
        self.reader.passes += passes
        self.reader.took(passes, besides)

    def _grow(self, states: Sequence[DraftTreeState]) -> None:
        self.reader.read(states)
