"""A model reads the trees of several requests at once, a level a pass: draft models, and the target's first layers.

Knows rows of a cache and logits; whose cache it is, and what becomes of the rows afterwards, is the drafter's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.running_mean import running_mean
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.reading import DraftTreeState
from sakiyomi.drafters.trees import BUILDERS, Builder, Growth, Ranks
from sakiyomi.sampling.sampler import Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.core.params import SamplingParams
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["LevelDrafter", "TreeReader", "begun", "is_drawn", "kind_of"]

DRAWN: dict[str, DraftKind] = {
    "chain": "chain",
    "static": "without_replacement",
    "choices": "without_replacement",
}
"""Shapes that are known before anything is drawn, so that the ratio rule may have draws, and of which kind."""
_FOLLOWED = 0.8  # of the nodes of a level that are accepted so many have a child that is, where the draft is good
# How much surer than the draft's own softmax one may be of its choice, before anything was seen (docs/log.md).
SHARPNESS = {"greedy": 2.0, "coupled": 1.4, "ratio": 1.0}


def kind_of(params: SamplingParams) -> DraftKind:
    """What is proposed to a request that is sampled by the ratio rule, by the shape that it asked for."""
    return DRAWN.get(params.builder, "point_mass")


def is_drawn(context: Context) -> bool:
    """Whether a request's candidates are drawn, and not chosen."""
    return context.rule == "ratio" and context.params.builder in DRAWN


def begun(context: Context, depth: int, nodes: int, ranks: Ranks) -> tuple[Growth, Builder]:
    """A tree of which nothing is known yet, and who decides its shape.

    Args:
        context: of the request.
        depth, nodes: at most; a chain has as many nodes as levels.
        ranks: acceptance by rank so far, as ``BUILDERS`` take it.
    """
    shape, worth = context.params.builder, context.worth
    growth = Growth(depth, depth if shape == "chain" else nodes)
    builder = BUILDERS[shape](context.params, ranks)
    if builder.picks and worth is not None:
        # A pass grows by steps: a node may pay that is worth less than its share of the largest one.
        growth.floor = worth.price(growth.nodes) / 2
    return growth, builder


class TreeReader:
    """Grows trees, and chains, from a model's logits: candidates of a level, and of those what is read next.

    Under "greedy" candidates are the model's most probable tokens, under "coupled" the top of log q + the position's
    noise; of a chain or a static tree under "ratio" they are drawn from its distribution after the same warpers as the
    target's, which is kept, and of the other trees, whose nodes are chosen afterwards, they are its most probable
    tokens.

    Args:
        model: reads.
        vocab_size: of the target; the model's may be padded differently.

    Attributes:
        passes: made so far, a level each.
        confidence: by rule, how often the model is right where it is so sure.
    """

    def __init__(self, model: ModelRunner, vocab_size: int) -> None:
        self.model = model
        self.passes = 0
        self.confidence = {rule: Confidence(sharpness) for rule, sharpness in SHARPNESS.items()}
        self._vocab_size = vocab_size
        self._besides = 1e-4  # seconds of a level outside the model

    def begin(
        self, context: Context, sampler: Sampler, name: str, gamma: int, slot: int, held: int
    ) -> DraftTreeState | None:
        """A tree of which nothing was read yet; None: the model's context ends here, where the target's may go on.

        Args:
            context: of the request.
            sampler: of the request, for the model's logits.
            name: of the drafter.
            gamma: depth wanted.
            slot: the request's place in the model's cache.
            held: committed tokens whose keys and values lie there, fewer than there are.
        """
        room = self.model.max_context - len(context.tokens)
        if room < 1:
            return None
        drawn = is_drawn(context)
        depth = min(gamma if drawn or context.worth is None else context.worth.depth, room)
        confidence = self.confidence[context.rule]
        growth, builder = begun(context, depth, context.nodes, confidence.ranks)
        return DraftTreeState(context, sampler, name, growth, builder, confidence, drawn, slot, held)

    def read(self, readings: Sequence[DraftTreeState]) -> None:
        """Grow these trees to their ends; afterwards all committed tokens lie in the cache, and the rows behind them.

        A tree for which there is no more memory ends where it is.
        """
        active = [reading for reading in readings if self._has_room(reading)]
        began, inside, passes = time.perf_counter(), self.model.forward_seconds, self.passes
        while active:
            segments = [reading.segment() for reading in active]
            logits = self.model.score(segments).logits
            self.passes += 1
            row = 0
            for reading, segment in zip(active, segments, strict=True):
                count = len(segment.tokens)
                self._take(reading, logits[row : row + count])
                row += count
            active = [reading for reading in active if reading.fresh and self._has_room(reading)]
        if self.passes > passes:
            besides = time.perf_counter() - began - (self.model.forward_seconds - inside)
            self._besides = running_mean(self._besides, besides / (self.passes - passes))

    def _has_room(self, reading: DraftTreeState) -> bool:
        try:
            self.model.cache.reserve(reading.slot, reading.columns)
        except MemoryLimitError:
            return False
        return True

    def _take(self, reading: DraftTreeState, logits: Tensor) -> None:
        """Candidates behind the rows of a pass, (rows, V of the model), and what to read next."""
        if not reading.growth.levels:
            places, logits = [-1], logits[-1:]
        else:
            places = reading.fresh
            reading.rows.extend(places)
        missing = self._vocab_size - logits.shape[1]
        if missing:  # vocabularies may be padded differently
            logits = F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :missing]
        reading.advance(places, logits)
        if not self._pays(reading, reading.fresh):
            reading.fresh = []

    def _pays(self, reading: DraftTreeState, places: list[int]) -> bool:
        """Whether reading these places is worth its pass."""
        if reading.worth is None or not places:
            return True
        price, values = reading.worth.price(reading.growth.nodes), reading.growth.values
        gain = sum(max(0.0, _FOLLOWED * values[place] - price) for place in places)
        return reading.worth.pays(gain, self.model.pass_seconds(len(places)) + self._besides)


class LevelDrafter:
    """Drafts with a model's passes over levels; how a tree begins on its cache is up to who derives from it.

    Args:
        model: reads.
        vocab_size: of the target.
    """

    name: str
    kind: DraftKind = "chain"

    def __init__(self, model: ModelRunner, vocab_size: int) -> None:
        self.model = model
        self.levels = TreeReader(model, vocab_size)

    def kind_for(self, params: SamplingParams) -> DraftKind:
        """See ``kind_of``."""
        return kind_of(params)

    @property
    def passes(self) -> int:
        """Passes so far, a level each."""
        return self.levels.passes

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the passes so far."""
        return self.model.forward_seconds

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``; all requests advance together, one pass a level."""
        readings = [self._begin(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]
        growing = [reading for reading in readings if reading is not None]
        self.levels.read(growing)
        for reading in growing:
            self._done(reading)
        return [Draft.empty() if reading is None else reading.draft() for reading in readings]

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        """The request's tree of which nothing was read yet; None: nothing can be drafted."""
        raise NotImplementedError

    def _done(self, reading: DraftTreeState) -> None:
        """Take note of a tree whose rows are written, as it is not when reading it was interrupted."""
