"""The target reads ahead on an excerpt of its own cache: no second model, and the fewer keys the longer the context.

What a long context costs is reading its keys and values; most of what attention sees lies in few of them. The draft is
the target itself on those few, and the target on all of them checks it, so that the text is the target's own. The
excerpt is drawn anew every few rounds by the queries of the last token that was checked (as in TriForce, Sun et al.
2024, arXiv 2404.11912): pages of neighbours by how large a product with one of their keys can be, from the least and
largest number in each place of them (Quest, Tang et al. 2024, arXiv 2406.10774), the first page and the last tokens
always. The mean of a page's keys would not find the one key of a page that answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sakiyomi.cache.eviction import QueryTrackingCache
from sakiyomi.core.errors import InputError, MemoryLimitError, UnsupportedError
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.levels import LevelDrafter
from sakiyomi.drafters.reading import DraftTreeState
from sakiyomi.model_executor.sparse_view import Excerpt
from sakiyomi.sampling.sampler import Sampler

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["SelfEvicted"]

BUDGET = 1024  # pairs of a head
PAGE = 16
AGAIN = 2  # rounds on one excerpt, beside the first
ROOM = 320  # columns behind an excerpt: what comes until the next one is drawn, and a tree


@dataclass(eq=False, slots=True)
class _Seat:
    """A request's excerpt.

    Attributes:
        slot: in the excerpts' cache.
        sampler: of the request.
        base: tokens of the text when it was drawn; 0: it was not yet.
        held: tokens that it is up to date with.
        rounds: since it was drawn.
        pages: of each layer the least and the largest numbers of each page's keys, (heads, pages, 2 x dim).
        reading: the tree that was read last.
    """

    slot: int
    sampler: Sampler
    base: int = 0
    held: int = 0
    rounds: int = 0
    pages: list[Tensor] = field(default_factory=list)
    reading: DraftTreeState | None = None


class SelfEvicted(LevelDrafter):
    """Drafts by the target on an excerpt of its cache.

    Args:
        target: made with ``watched``.
        budget: pairs of a head in an excerpt.

    Raises:
        UnsupportedError: the target's cache is an excerpt itself, or not one of ours alone.
        InputError: the budget is too small.
    """

    name = "self-evicted"

    def __init__(self, target: ModelRunner, budget: int = BUDGET) -> None:
        whole = not target.weights.own_attention and target.sources is None and not target.cache.states
        if not isinstance(target.eviction, QueryTrackingCache) or not whole:
            raise UnsupportedError(
                f"draft self-evicted: it draws from all keys and values of {type(target.module).__name__}, and these "
                "are not all there, or the model keeps them otherwise; use cache='full', or another draft"
            )
        if budget < 4 * PAGE:
            raise InputError(f"draft self-evicted:{budget}: an excerpt has {4 * PAGE} pairs or more")
        self._target, self._eviction, self._budget = target, target.eviction, budget
        super().__init__(Excerpt(target, budget + ROOM), target.vocab_size)

    def end(self, context: Context) -> None:
        """Free the request's place."""
        seat: _Seat | None = context.memory.pop(self.name, None)
        if seat is not None:
            self.model.cache.release(seat.slot)

    # ------------------------------------------------------------ excerpts

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        seat: _Seat | None = context.memory.get(self.name)
        if seat is None:
            sampler = Sampler(context.params, self.model.vocab_size)
            seat = context.memory[self.name] = _Seat(self.model.cache.take(), sampler)
        if seat.reading is not None:
            seat.reading.settle(context.tokens)
            seat.reading = None
        length = len(context.tokens) - 1
        try:
            if not self._bring_up(seat, context.slot, length):
                return None
        except MemoryLimitError:
            return None
        gamma = min(gamma, max(1, self._budget + ROOM - 1 - (length - self.model.cache.least(seat.slot))))
        seat.reading = self.levels.begin(context, seat.sampler, self.name, gamma, seat.slot, length)
        return seat.reading

    def _bring_up(self, seat: _Seat, slot: int, length: int) -> bool:
        """Have the excerpt end with the target's own pairs of all tokens but the last."""
        queries = self._eviction.queries(slot)
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
        """Of each layer the columns of an excerpt, (heads, n)."""
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
        pages: (heads, pages, 2 x dim), least and largest numbers of their keys.
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
