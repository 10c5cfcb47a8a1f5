"""Drafts with the target itself on an excerpt of its cache, for long contexts without a second model.

With a long context most time is spent reading keys and values, and most attention goes to few of them. The target
drafts on those few and verifies on all of them. The excerpt is selected again every few rounds by the queries of the
last verified token, as in TriForce (Sun et al. 2024, arXiv 2404.11912). It has the pages of neighbouring tokens that
may hold the key with the largest product, estimated from the minimum and maximum of each coordinate (Quest, Tang et al.
2024, arXiv 2406.10774), the first page and the last tokens. The mean of a page's keys would miss a single key that
matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError, MemoryLimitError, UnsupportedError
from sakiyomi.drafters.base import Context, DrafterContext
from sakiyomi.drafters.draft_tree_state import DraftTreeState, RequestMemory
from sakiyomi.drafters.tree_reader import TreeDrafter, TreeReader
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.sparse_view import Excerpt

BUDGET = 1024  # pairs of a head
PAGE = 16
AGAIN = 2  # rounds on one excerpt, beside the first
ROOM = 320  # columns behind an excerpt: for the tokens until the next selection, and for a tree


@dataclass(eq=False, slots=True)
class _Seat(RequestMemory):
    """A request's excerpt.

    Attributes:
        slot: in the excerpts' cache; -1: it has none yet.
        base: tokens of the text when it was selected; 0: not yet.
        held: tokens of the text that were considered for it; later ones are missing.
        rounds: since it was selected.
        pages: for each layer the minima and maxima of each page's keys, (heads, pages, 2 x dim).
    """

    slot: int = -1
    base: int = 0
    held: int = 0
    rounds: int = 0
    pages: list[Tensor] = field(default_factory=list)


class SelfEvicted(TreeDrafter):
    """Drafts with the target on an excerpt of its cache.

    Args:
        target: its cache holds all keys and values; the queries of each slot's last row are kept too from now on.
        budget: pairs of a head in an excerpt.

    Raises:
        UnsupportedError: the target's cache does not hold all keys and values.
        InputError: the budget is too small.
    """

    name = "self-evicted"

    def __init__(self, target: ModelRunner, budget: int = BUDGET) -> None:
        if budget < 4 * PAGE:
            raise InputError(
                f"draft self-evicted:{budget}: expected at least {4 * PAGE} pairs of a head; write self-evicted:1024"
            )
        try:
            self._queries = target.track_queries().queries
        except UnsupportedError as error:
            raise UnsupportedError(f"draft self-evicted: {error}, or another draft") from None
        self._target, self._budget = target, budget
        super().__init__(TreeReader(Excerpt(target, budget + ROOM), target.vocab_size))

    @classmethod
    def make(cls, pairs: int | None, around: DrafterContext) -> SelfEvicted:
        """A drafter with excerpts of so many pairs, ``BUDGET`` where no number is given."""
        return cls(around.packed, BUDGET if pairs is None else pairs)

    def end(self, context: Context) -> None:
        """Free the request's slot."""
        seat: _Seat | None = context.memory.pop(self.name, None)
        if seat is not None and seat.slot >= 0:
            self.model.cache.release(seat.slot)

    # ------------------------------------------------------------ excerpts

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        seat = _Seat.of(context, self.name, self.model.vocab_size)
        if seat.slot < 0:
            seat.slot = self.model.cache.take()
        length = len(context.tokens) - 1
        try:
            if not self._bring_up(seat, context.slot, length):
                return None
        except MemoryLimitError:
            return None
        gamma = min(gamma, max(1, self._budget + ROOM - 1 - (length - self.model.cache.least(seat.slot))))
        seat.tree = self.reader.begin(context, seat.sampler, self.name, gamma, seat.slot, length)
        return seat.tree

    def _bring_up(self, seat: _Seat, slot: int, length: int) -> bool:
        """Update the excerpt up to the last token but one; False where it cannot be selected yet."""
        queries = self._queries(slot)
        if queries is None or length < 1:
            return False
        seat.rounds += 1
        if not seat.base or seat.rounds > AGAIN or length - seat.base > ROOM // 2:
            columns = self._choose(seat, slot, length, queries)
            self.model.cache.clear(seat.slot)
            self.model.cache.reserve(seat.slot, columns[0].shape[1] + ROOM)
            self.model.cache.excerpt(seat.slot, length, self._target.cache, slot, columns)
            seat.base, seat.rounds = length, 0
        else:
            self.model.cache.copy(seat.slot, seat.held, length, self._target.cache, slot)
        seat.held = length
        return True

    def _choose(self, seat: _Seat, slot: int, length: int, queries: list[Tensor]) -> list[Tensor]:
        """The columns of an excerpt for each layer, (heads, n)."""
        cache, chosen = self._target.cache, []
        for layer, shape in enumerate(cache.shapes):
            if length <= self._budget:
                chosen.append(torch.arange(length, device=shape.device).expand(shape.heads, -1))
                continue
            keys = cache.keys[layer][slot]
            if len(seat.pages) <= layer:
                seat.pages.append(keys.new_zeros(shape.heads, 0, 2 * shape.key_dim))
            known, whole = seat.pages[layer].shape[1], length // PAGE
            if whole > known:
                fresh = keys[:, known * PAGE : whole * PAGE].unflatten(1, (-1, PAGE))
                fresh = torch.cat([fresh.amin(2), fresh.amax(2)], -1)
                seat.pages[layer] = torch.cat([seat.pages[layer], fresh], 1)
            chosen.append(_pages(seat.pages[layer], queries[layer], length, self._budget, shape.window))
        return chosen


def _pages(pages: Tensor, query: Tensor, length: int, budget: int, window: int) -> Tensor:
    """Columns of the best pages: (heads, budget), ascending; the last quarter are the last of the text.

    Args:
        pages: (heads, pages, 2 x dim), minima and maxima of their keys.
        query: (query heads x dim), scaled.
        length: of the text.
        budget: columns.
        window: of a layer that sees its last tokens alone; 0: it sees all.
    """
    heads, dim = len(pages), pages.shape[2] // 2
    if window:
        return torch.arange(length - budget, length, device=pages.device).expand(heads, -1)
    take = (budget - budget // 4) // PAGE
    recent = budget - take * PAGE
    candidates = pages[:, : (length - recent) // PAGE].float()
    query = query.view(heads, -1, dim).float()
    bound = torch.cat([query.clamp(max=0), query.clamp(min=0)], -1)
    scores = (bound @ candidates.transpose(1, 2)).softmax(-1).sum(1)
    scores[:, 0] = torch.inf
    best = scores.topk(take, 1).indices.sort(1).values
    old = (best[..., None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten(1)
    last = torch.arange(length - recent, length, device=pages.device).expand(heads, -1)
    return torch.cat([old, last], 1)
