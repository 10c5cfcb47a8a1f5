"""Trees of drafts that come in one pass: each level is a slot, whose candidates do not depend on the path to it.

Medusa's heads, block drafters and draft models that guess several tokens at once make such drafts. The best tree has
the nodes with the largest products of their slots' chances. A heap finds it (DDTree, arXiv 2604.12989, section 3): the
best path first, then its next sibling and its first child, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from torch import Tensor

from sakiyomi.drafters.base import Context, Rule
from sakiyomi.drafters.beside import Beside
from sakiyomi.drafters.confidence import RANKS, Confidence
from sakiyomi.drafters.draft_tree_state import DraftTreeState, TreePlan
from sakiyomi.drafters.head_model import over_vocabulary
from sakiyomi.drafters.tree_reader import SHARPNESS, GrowingDrafter, TreeReader, begin_tree, is_drawn
from sakiyomi.drafters.trees import BestFirst
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.sampler import Sampler

MASKS = 16
"""Most tokens of a pass of ``ParallelReader``; published drafts were trained for 8."""

SlotLogits = Callable[[int, Sequence[int]], tuple[Tensor, Sequence[float] | None]]
"""From a slot and the candidates before it to logits, (places, V), and how likely guesses are to be accepted there."""
_Found = tuple[list[int], list[float | None], list[float]]
_Path = tuple[int, ...]  # ranks


@dataclass(eq=False)
class SlotTree(DraftTreeState):
    """The tree of one request, a level for each slot."""

    _known: dict[int, _Found] | None = field(default_factory=dict)  # by slot; None: a slot's candidates differ
    _sure: dict[int, float] = field(default_factory=dict)  # by place, of the level that is read
    _trust: float | None = None  # of the place that is read

    @property
    def columns(self) -> int:
        """See ``DraftTreeState.columns``: in the one pass stand masks for all levels but the first."""
        return self.first - self.lead + self.candidates.depth - 1

    def grow(self, logits: Tensor) -> None:
        """Add all levels from the logits of all slots, (slots, V)."""
        if isinstance(self.builder, BestFirst) and not self.sampler.edits:
            self._pick(logits)
        else:
            self._read_levels(lambda level, places: (logits[level].expand(len(places), -1), None))

    def grow_by(self, slot: SlotLogits) -> None:
        """Add all levels, where the guesses of a slot depend on the candidates before it."""
        self._known = None
        self._read_levels(slot)

    def _read_levels(self, slot: SlotLogits) -> None:
        places = [-1]
        while places and self.candidates.levels < self.candidates.depth:
            logits, sure = slot(self.candidates.levels, places)
            self._sure = {} if sure is None else dict(zip(places, sure, strict=True))
            self.advance(places, logits)
            places, self.unread = self.unread, []

    def read(self, place: int, logits: Tensor, ranked: tuple[list[int], list[float]] | None = None) -> None:
        """See ``DraftTreeState.read``."""
        self._trust = self._sure.get(place)
        super().read(place, logits, ranked)

    def chances(self, level: int, probs: Sequence[float | None], scores: Sequence[float]) -> list[float]:
        """See ``DraftTreeState.chances``; the first candidate has the chance that the drafter claims, if any."""
        found = super().chances(level, probs, scores)
        if self._trust is None:
            return found
        scale = min(self._trust / max(found[0], 1e-9), 1 / sum(found))
        return [chance * scale for chance in found]

    def _pick(self, logits: Tensor) -> None:
        """Choose the nodes of largest product by a heap, and add them level by level, siblings in their order."""
        tree, stops = self.candidates, self.context.stop_ids
        count = self.candidate_count(-1)
        slots: list[tuple[_Found, list[float]]] = []
        heap: list[tuple[float, int, _Path, float]] = []
        children: dict[_Path, int] = {}

        def push(path: _Path, above: float) -> None:
            level = len(path) - 1
            if level == len(slots):
                found = super(SlotTree, self)._candidates(-1, logits[level], count, self.first + level)
                slots.append((found, self.chances(level, *found[1:])))
            chances = slots[level][1]
            if path[-1] < len(chances) and (value := above * chances[path[-1]]) >= tree.floor:
                heappush(heap, (-value, level, path, above))

        push((0,), 1.0)
        for _ in range(tree.nodes):
            if not heap:
                break
            negated, level, path, above = heappop(heap)
            children[path[:-1]] = path[-1] + 1
            push((*path[:-1], path[-1] + 1), above)
            if level + 1 < tree.depth and slots[level][0][0][path[-1]] not in stops:
                push((*path, 0), -negated)
        places: dict[_Path, int] = {(): -1}
        for above_path, kept in sorted(children.items(), key=lambda each: len(each[0])):
            level, place = len(above_path), places[above_path]
            if level == tree.levels:
                tree.begin_level()
            (tokens, probs, scores), chances = slots[level]
            self.listed[place] = (len(tree.tokens), tokens, scores)
            places |= {(*above_path, rank): len(tree.tokens) + rank for rank in range(kept)}
            self._probs.extend(probs[: tree.offer(place, tokens[:kept], chances[:kept])])

    def _ranked(self, places: Sequence[int], logits: Tensor) -> Sequence[tuple[list[int], list[float]] | None]:
        return super()._ranked(places, logits) if self._known is None else [None] * len(places)

    def _candidates(self, place: int, logits: Tensor, count: int, position: int) -> _Found:
        if self.drawn or self.sampler.edits or self._known is None:
            return super()._candidates(place, logits, count, position)
        level = self.candidates.levels
        found = self._known.get(level)
        if found is None or len(found[0]) < count:
            found = self._known[level] = super()._candidates(
                place, logits, max(count, self.plan.breadth or 0), position
            )
        tokens, probs, scores = found
        return tokens[:count], probs[:count], scores[:count]


class Slots:
    """The slots of a drafter: how often their candidates are accepted, and trees that grow from them.

    Args:
        count: tokens that are guessed in a pass.
        ranks: initial acceptance of each slot's candidates by rank.
    """

    def __init__(self, count: int, ranks: Sequence[Sequence[float]] | None = None) -> None:
        self.count = count
        levels = ranks or [RANKS] * count
        self.confidence = {
            rule: [Confidence(sharpness, level[: len(RANKS)]) for level in levels]
            for rule, sharpness in SHARPNESS.items()
        }

    def plan(self, context: Context, gamma: int, most: tuple[int, int, int] | None = None) -> TreePlan:
        """What a request's tree is to become.

        Args:
            context: of the request.
            gamma: depth wanted.
            most: largest depth, nodes, and candidates of a place, where costs decide the size.
        """
        worth, drawn = context.worth, is_drawn(context)
        depth, nodes, breadth = min(gamma, self.count), context.nodes, None
        if worth is not None:
            depth = min(self.count if not drawn else depth, worth.depth)
            if most is not None:
                depth, nodes, breadth = min(depth, most[0]), min(nodes, most[1]), most[2]
        levels = self.confidence[context.rule]
        tree, builder = begin_tree(context, depth, nodes, lambda: [level.ranks for level in levels[:depth]])
        return TreePlan(tree, builder, None if drawn else worth, levels, breadth)

    def begin(
        self, context: Context, name: str, sampler: Sampler, gamma: int, most: tuple[int, int, int] | None = None
    ) -> SlotTree:
        """A tree without a level, see ``plan``.

        Args:
            name: of the drafter.
            sampler: of the request.
        """
        return SlotTree(context, sampler, name, self.plan(context, gamma, most), is_drawn(context), context.slot, 0)

    def learn(self, rule: Rule, places: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Learn what the target chose at each place of a tree that it came to, see ``GrowingDrafter.learn``."""
        for level, (rank, scores) in zip(self.confidence[rule], places, strict=False):
            level.learn(scores, rank if rank >= 0 else None)


class OnePassDrafter(GrowingDrafter):
    """Drafts with guesses that come in one pass for all requests.

    Args:
        runner: makes the passes, and counts them and their seconds.
        slots: of the guesses.
    """

    one_pass = True

    def __init__(self, runner: Beside, slots: Slots) -> None:
        self._runner, self._slots, self.levels = runner, slots, slots.count

    @property
    def passes(self) -> int:
        """See ``Drafter.passes``."""
        return self._runner.passes

    @property
    def forward_seconds(self) -> float:
        """See ``Drafter.forward_seconds``."""
        return self._runner.seconds

    def plan(self, context: Context, gamma: int) -> TreePlan | None:
        """See ``GrowingDrafter``."""
        return self._slots.plan(context, gamma)

    def learn(self, context: Context, places: Sequence[tuple[int, Sequence[float]]]) -> None:
        """See ``GrowingDrafter``."""
        self._slots.learn(context.rule, places)

    def ran(self, passes: int, seconds: float, besides: float) -> None:
        """See ``GrowingDrafter``."""
        self._runner.passes += passes
        self._runner.seconds += seconds


class ParallelReader(TreeReader):
    """Grows trees and chains of draft models that guess several tokens in one pass, at masks behind the text.

    PARD (arXiv 2504.18583): a model trained for it reads the missing tokens and some masks. The last token gives the
    first guess, the first mask the second, and so on. Masks leave nothing in the cache.

    Args:
        model: the draft model.
        vocab_size: of the target.
        mask: token that stands for one to be guessed.
    """

    state = SlotTree
    one_pass = True
    levels = MASKS

    def __init__(self, model: ModelRunner, vocab_size: int, mask: int) -> None:
        super().__init__(model, vocab_size)
        self._mask, self._slots = mask, Slots(MASKS)

    def plan(self, context: Context, gamma: int) -> TreePlan | None:
        """See ``TreeReader.plan``."""
        room = self.model.max_context - len(context.tokens)
        if room < 1:
            return None
        plan = self._slots.plan(context, min(gamma, room))
        plan.tree.depth = min(plan.tree.depth, room)
        return plan

    def learn(self, rule: Rule, places: Sequence[tuple[int, Sequence[float]]]) -> None:
        """See ``TreeReader.learn``."""
        self._slots.learn(rule, places)

    def read(self, states: Sequence[DraftTreeState]) -> None:
        """See ``TreeReader.read``: afterwards the cache holds all committed tokens."""
        trees = [state for state in states if isinstance(state, SlotTree) and self._has_room(state)]
        if not trees:
            return
        rows = [tree.segment() for tree in trees]
        segments = [
            replace(part, tokens=[*part.tokens, *[self._mask] * (tree.candidates.depth - 1)])
            for tree, part in zip(trees, rows, strict=True)
        ]
        logits = over_vocabulary(self._score(trees, segments), None, self._vocab_size)
        self.passes += 1
        for tree, own in zip(trees, logits.split([len(segment.tokens) for segment in segments]), strict=True):
            tree.grow(own[-tree.candidates.depth :])
