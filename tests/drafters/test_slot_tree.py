"""Trees from slots: the heap finds the nodes of largest product, as a search over all paths does."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sakiyomi import InputError, SamplingParams
from sakiyomi.drafters.base import Context, Rule
from sakiyomi.drafters.draft_tree_state import drafts_of
from sakiyomi.drafters.seats import Seat, SeatDrafter
from sakiyomi.drafters.slot_tree import Slots, SlotTree
from sakiyomi.drafters.tree_reader import kind_of
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler

V = 9


def begun(
    slots: Slots,
    depth: int,
    nodes: int,
    tree: str = "ddtree",
    rule: Rule = "greedy",
    stop: frozenset[int] = frozenset(),
) -> SlotTree:
    values: dict[str, Any] = {"temperature": 0.0 if rule == "greedy" else 1.0}
    params = SamplingParams(tree=tree, **values)
    context = Context(1, [1, 2], params, rule, RequestNoise(5), stop, nodes)
    return slots.begin(context, "toy", Sampler(params, V), depth)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(1, 4))
def test_the_heap_finds_the_largest_products(seed: int, nodes: int, depth: int) -> None:
    logits = 2 * torch.randn(4, V, generator=torch.Generator().manual_seed(seed))
    probs = logits.softmax(-1).tolist()
    tree = begun(Slots(4), depth, nodes)
    tree.grow(logits)
    draft = drafts_of([tree])[0]
    paths = [draft.tree.path_tokens(node) for node in range(len(draft.tree))]
    found = sorted((math.prod(probs[i][token] for i, token in enumerate(path)) for path in paths), reverse=True)
    every = itertools.chain.from_iterable(itertools.product(range(V), repeat=k) for k in range(1, depth + 1))
    values = (math.prod(probs[i][token] for i, token in enumerate(path)) for path in every)
    assert found == pytest.approx(sorted(values, reverse=True)[:nodes], rel=1e-4)
    claimed = draft.tree.products([draw.chance or 0.0 for draw in draft.draws])
    assert sorted(claimed, reverse=True) == pytest.approx(found, rel=1e-4)
    tree.learn([1, 2, *paths[-1]])  # every place of the path is known


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_best_first_is_the_same_level_by_level(rule: Rule) -> None:
    """With chances that were learnt, too, and without going on behind the end of the text."""
    slots, generator = Slots(4), torch.Generator().manual_seed(1)
    for confidence in slots.confidence[rule]:
        confidence.sharpness = 0.7
    for _ in range(20):
        logits = 2 * torch.randn(4, V, generator=generator)
        picked = begun(slots, 4, 12, "best-first", rule, frozenset({3}))
        picked.grow(logits)
        found = drafts_of([picked])[0].tree
        plain = begun(slots, 4, 12, "best-first", rule, frozenset({3}))
        plain._read_levels(lambda level, places, logits=logits: (logits[level].expand(len(places), -1), None))
        other = drafts_of([plain])[0].tree
        assert {found.path_tokens(node) for node in range(12)} == {other.path_tokens(node) for node in range(12)}


def test_a_tree_that_is_deeper_than_there_are_slots() -> None:
    with pytest.raises(InputError, match="tree has 3 levels, and this draft guesses 2"):
        kind_of(SamplingParams(tree=[1, 2, 2, 2]), 2)


def test_claimed_chances_bound_a_tree() -> None:
    """Where the drafter says how far to trust a slot, the first candidate has that chance."""
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(2))
    tree = begun(Slots(3), 3, 12, "best-first")
    tree.grow_by(lambda level, places: (logits[level].expand(len(places), -1), [0.25] * len(places)))
    firsts = [c for c, rank in zip(tree.candidates.chances, tree.candidates.ranks, strict=True) if rank == 0]
    assert firsts == pytest.approx([0.25] * len(firsts))


def test_the_last_tree_of_a_turn_is_not_learnt_from_in_the_next() -> None:
    """What the user says behind it is no miss of the drafter."""
    tree = begun(Slots(3), 3, 3)
    earlier = tree.context
    later = Context(2, [1, 2, 3], earlier.params, "greedy", RequestNoise(5), frozenset(), 3)
    earlier.memory["toy"] = Seat(tree.sampler, tree=tree, slot=4)
    drafter: Any = SimpleNamespace(name="toy", _vocab_size=V)
    SeatDrafter.inherit(drafter, later, earlier)
    assert (later.memory["toy"].slot, later.memory["toy"].tree) == (4, None)
