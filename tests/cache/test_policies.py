"""Which pairs stay at an eviction boundary, by hand: the best ones, those that are pinned, in the order of the text."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.eviction import EvictingCache
from sakiyomi.cache.eviction_plan import EvictionPlan
from sakiyomi.cache.host import CacheHost
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.policies.base import Policy, View
from sakiyomi.cache.policies.h2o import H2O
from sakiyomi.cache.slots import SlotCache
from toys import places_of


class Given(Policy):
    """Scores that a test gives, by place."""

    def __init__(self, scores: list[float], **options: Any) -> None:
        super().__init__(**({"sinks": 0, "local": 0} | options))
        self.given = torch.tensor(scores)

    def score(self, view: View) -> Tensor:
        return self.given[view.places]


def view(count: int, budget: int, **values: Any) -> View:
    """Two heads that hold all of so many tokens."""
    pairs = torch.zeros(2, count, 4)
    known: dict[str, Any] = {
        **dict.fromkeys(("prompt", "length", "new_count"), count),
        **dict.fromkeys(("keys", "values"), pairs),
        **dict.fromkeys(("observations", "neg_log_prob")),
    }
    places, before = torch.arange(count).expand(2, -1), torch.zeros(2, 0)
    heads = {"layer": 0, "heads": slice(0, 2), "all_heads": 2, "moved": 0}
    return View(**(known | heads | {"budget": budget, "places": places, "previous_scores": before} | values))


SCORES = [5.0, 0.0, 9.0, 3.0, 7.0, 1.0, 8.0, 2.0]


@pytest.mark.parametrize(
    ("options", "budget", "kept"),
    [
        ({}, 3, [2, 6, 4]),
        ({}, 8, None),
        ({"sinks": 2}, 4, [1, 0, 2, 6]),
        ({"local": 2}, 4, [7, 6, 2, 4]),
        ({"sinks": 1, "local": 1}, 3, [7, 0, 2]),
        ({"recent": 0.5}, 4, [7, 6, 2, 4]),
        ({"ends": 0.5}, 4, [7, 0, 2, 6]),
    ],
)
def test_the_best_pairs_and_pinned_ones_stay(options: dict[str, Any], budget: int, kept: list[int] | None) -> None:
    policy, seen = Given(SCORES, **options), view(8, budget)
    best = policy.best(seen, policy.score(seen), window=0)
    assert (best if best is None else best.tolist()) == (kept if kept is None else [kept, kept])


def test_of_equal_pairs_the_later_ones_stay() -> None:
    policy, seen = Given([1.0] * 8), view(8, 3)
    found = policy.best(seen, policy.score(seen), window=0)
    assert found is not None and found.tolist() == [[7, 6, 5]] * 2


def test_layers_with_a_window_keep_their_last_pairs() -> None:
    policy, seen = Given(SCORES, sinks=2), view(8, 3)
    found = policy.best(seen, policy.score(seen), window=3)
    assert found is not None and found.tolist() == [[7, 6, 5]] * 2


def test_what_is_generated_stays_where_prompts_alone_are_cut() -> None:
    policy = Given(SCORES, where="prompt")
    for prompt, dropped in ((8, True), (7, False)):
        seen = view(8, 3, prompt=prompt)
        assert (policy.best(seen, policy.score(seen), window=0) is not None) is dropped


def test_sums_of_a_long_chunk_begin_with_those_before() -> None:
    """Sums in another order differ in their last bits, and may choose other pairs."""
    generator = torch.Generator().manual_seed(0)
    rows, known = 300, 20
    before = torch.rand(2, known, generator=generator) * 100
    keys, queries = (torch.randn(*shape, generator=generator) for shape in ((2, known + rows, 4), (rows, 16)))
    seen = view(known + rows, 50, new_count=rows, keys=keys, observations=queries, previous_scores=before)
    policy = H2O()
    expected = F.pad(before, (0, rows))
    for part in policy.looks(seen):
        expected = expected + part.sum((1, 2))
    assert torch.equal(policy.score(seen), expected)


def test_what_stays_lies_in_the_order_of_the_text() -> None:
    """Over the borders of a prompt's chunks and of what is generated, each pair a number that says its place."""
    shape, prompt, budget = LayerShape(2, 4, 4), 20, 6
    scores = torch.rand(300, generator=torch.Generator().manual_seed(0)).tolist()
    plan = EvictionPlan(Given(scores, sinks=1, local=2), budget, chunk=8)
    capacity = plan.capacity([shape], 4, 1)
    cache = SlotCache([shape], dtype=torch.float32, max_slots=1, limits=capacity.limits)
    eviction = EvictingCache(plan, capacity, cache, cast(CacheHost, None))
    slot = cache.take()
    eviction.begin(slot)
    kept: list[int] = []
    first, borders = 0, []
    while first < 200:
        border = eviction.boundary(slot, prompt)
        cache.reserve(slot, border)
        (part,) = cache.parts(0, slot)
        own = slice(first - part.dropped, border - part.dropped)
        part.keys[:, own] = part.values[:, own] = torch.arange(first, border).float()[:, None]
        eviction.evict(slot, prompt, border - 1)  # too early: nothing happens
        eviction.evict(slot, prompt, border)
        kept += range(first, border)
        pinned = [place for place in kept if place < 1 or place >= border - 2]
        others = sorted(set(kept) - set(pinned), key=scores.__getitem__, reverse=True)
        kept = sorted([*pinned, *others[: budget - len(pinned)]])
        (part,) = cache.parts(0, slot)
        for head in (0, 1):
            assert places_of(eviction, slot)[0][head].tolist() == kept
            for pairs in (part.keys, part.values):
                assert pairs[head, : border - part.dropped, 0].tolist() == kept
        first = border
        borders.append(border)
    assert borders == [8, 16, 20, 84, 148, 212]
