"""Tree builders against slow clear ones: which shape they give for which chances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import TREES, SamplingParams
from sakiyomi.drafters.trees import (
    BUILDERS,
    BestFirst,
    Builder,
    CandidateTree,
    Dynamic,
    Static,
)
from sakiyomi.theory import best_tree, expected_tree_tokens

Chances = Callable[[tuple[int, ...]], Sequence[float]]


def grow(builder: Builder, chances: Chances, nodes: int, depth: int) -> tuple[CandidateTree, int]:
    """Read a draft to the end that gives these chances behind each path of tokens; its tokens are ranks."""
    growth, reads = CandidateTree(depth, nodes), 0
    places = [-1]
    while places and growth.levels < depth:
        reads += len(places)
        growth.begin_level()
        for place in places:
            listed = list(chances(growth.rank_path(place)))[: builder.candidate_count(growth, place)]
            growth.offer(place, range(len(listed)), listed)
        places = builder.expand(growth)
    return growth, reads


def paths(growth: CandidateTree, builder: Builder) -> list[tuple[int, ...]]:
    return [growth.rank_path(candidate) for candidate in builder.chosen(growth)]


def chances_of(seed: int, width: int = 4) -> Chances:
    """Fixed, different for each path, falling by rank, together below 1."""

    def chances(path: tuple[int, ...]) -> list[float]:
        key = hash((seed, path)) % 1000 / 1000
        weights = [(0.2 + key) ** rank for rank in range(width)]
        return [0.95 * weight / sum(weights) for weight in sorted(weights, reverse=True)]

    return chances


def value(path: tuple[int, ...], chances: Chances) -> float:
    return math.prod(chances(path[:i])[rank] for i, rank in enumerate(path))


def one_by_one(chances: Chances, nodes: int, depth: int) -> list[float]:
    """Values of the best tree grown node by node: the clear form of best-first."""
    tree: set[tuple[int, ...]] = {()}
    for _ in range(nodes):
        open_ = [
            (*path, rank)
            for path in tree
            if len(path) < depth
            for rank in range(len(chances(path)))
            if (*path, rank) not in tree
        ]
        if open_:
            tree.add(max(open_, key=lambda path: value(path, chances)))
    return sorted((value(path, chances) for path in tree if path), reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 6))
def test_best_first_is_the_best_tree_node_by_node(seed: int, nodes: int, depth: int) -> None:
    chances, builder = chances_of(seed), BestFirst()
    growth, reads = grow(builder, chances, nodes, depth)
    found = sorted((growth.values[i] for i in builder.chosen(growth)), reverse=True)
    assert found == pytest.approx(one_by_one(chances, nodes, depth))
    assert reads <= 1 + nodes * (depth - 1)


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "choices"])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (3, 5), (15, 4), (31, 16)])
def test_every_builder_gives_a_tree_of_what_it_was_asked_for(name: str, nodes: int, depth: int) -> None:
    builder = BUILDERS[name](SamplingParams(), lambda: [0.6, 0.2, 0.1, 0.05])
    growth, _ = grow(builder, chances_of(3), nodes, depth)
    found = paths(growth, builder)
    assert len(found) == len(set(found)) <= nodes
    assert max(map(len, found)) <= depth
    for i, path in enumerate(found):
        assert len(path) == 1 or path[:-1] in found[:i], "a node without the one it hangs from before it"


def test_names_are_those_of_the_parameter() -> None:
    assert {"auto", *BUILDERS} == {*TREES, "choices"}, "choices are given as a list"


def test_a_chain_has_one_path() -> None:
    builder = BUILDERS["chain"](SamplingParams(), list)
    growth, reads = grow(builder, chances_of(1), 4, 4)
    assert paths(growth, builder) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert reads == 4


def test_dynamic_reads_a_fixed_number_of_places_a_level() -> None:
    growth, reads = grow(Dynamic(3), chances_of(2), 12, 5)
    assert reads == 1 + 3 * 4
    assert len(Dynamic(3).chosen(growth)) == 12


def test_dynamic_of_all_places_is_best_first() -> None:
    chances = chances_of(5)
    wide, best = Dynamic(1000), BestFirst()
    first, _ = grow(wide, chances, 9, 3)
    second, _ = grow(best, chances, 9, 3)
    assert set(paths(first, wide)) == set(paths(second, best))


def test_static_reads_nothing_that_is_not_in_its_shape() -> None:
    ranks = [0.6, 0.25, 0.1]
    builder = Static(ranks)
    growth, reads = grow(builder, chances_of(4), 10, 4)
    shape = best_tree(ranks, 10, 4)
    assert set(paths(growth, builder)) == set(shape)
    assert reads == len({path[:-1] for path in shape})


def dynamic_programme(ranks: Sequence[float], nodes: int, depth: int) -> float:
    """Sequoia's recursion: the best expected tokens of a subtree with so many nodes, its root among them, and levels.

    Forests of children are put together rank by rank; O(nodes^2 x ranks x depth).
    """
    tree = [[-math.inf] * (nodes + 1) for _ in range(depth + 1)]  # tree[levels below][nodes]
    for levels in range(depth + 1):
        # forest[n]: best sum over children of ranks >= r with n nodes together
        forest = [0.0] + [-math.inf] * nodes
        for rank in reversed(range(len(ranks))) if levels else []:
            new = [0.0] + [-math.inf] * nodes
            for total in range(1, nodes + 1):
                for own in range(1, total + 1):
                    new[total] = max(new[total], ranks[rank] * tree[levels - 1][own] + forest[total - own])
            forest = new
        for count in range(1, nodes + 1):
            tree[levels][count] = max(1.0 + max(forest[:count]), 1.0)
    return tree[depth][nodes]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4).map(lambda chances: sorted(chances, reverse=True)),
    st.integers(0, 9),
    st.integers(1, 4),
)
def test_the_greedy_rule_finds_what_the_dynamic_programme_finds(ranks: list[float], nodes: int, depth: int) -> None:
    found = expected_tree_tokens(ranks, best_tree(ranks, nodes, depth))
    assert found == pytest.approx(dynamic_programme(ranks, nodes + 1, depth))


def test_figures_of_medusa() -> None:
    """From published rank accuracies of a 7B model's heads a chain gives less than trees of 8 and 63 nodes."""
    ranks = [0.55, 0.13, 0.06, 0.04, 0.03]
    taus = [expected_tree_tokens(ranks, best_tree(ranks, nodes, 4)) for nodes in (4, 8, 16, 63)]
    chain = expected_tree_tokens(ranks, [(0,) * (i + 1) for i in range(4)])
    assert chain <= taus[0] < taus[1] < taus[2] < taus[3]
    gains = [after - before for before, after in itertools.pairwise(taus)]
    assert gains[0] / 4 > gains[1] / 8 > gains[2] / 47, "every further node adds less"


def test_a_beginning_of_the_list_is_the_best_smaller_tree() -> None:
    ranks = [0.5, 0.3, 0.1]
    whole = best_tree(ranks, 12, 3)
    for count in range(12):
        assert best_tree(ranks, count, 3) == whole[:count]
    with pytest.raises(InputError, match="largest first"):
        best_tree([0.1, 0.5], 3, 3)
    with pytest.raises(InputError):
        best_tree([], 3, 3)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ([1, 2, 3], [(0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
        ([[0, 0], [0], [1]], [(0,), (1,), (0, 0)]),
        ([1, 1, 1], [(0,), (0, 0)]),
    ],
)
def test_choices_are_the_nodes_that_were_given(tree: Any, expected: list[tuple[int, ...]]) -> None:
    params = SamplingParams(tree=tree)
    assert params.builder == "choices"
    assert list(params.choices) == expected
    builder = BUILDERS["choices"](params, list)
    growth, _ = grow(builder, chances_of(3), len(expected), max(map(len, expected)))
    assert sorted(paths(growth, builder)) == sorted(expected)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ([2, 3], "counts begin with 1"),
        ([1], "counts begin with 1"),
        ([1, 1000, 1000, 1000], "more than 1024 nodes"),
        ([1, 0], "counts begin with 1"),
        ([], "expected counts such as"),
        ([[0], "x"], "expected counts such as"),
        ([[0], [1.5]], "expected counts such as"),
        ([[0, 0]], r"not \[0\]"),
        ([[1]], r"not \[0\]"),
        ([[0], [0, 1]], r"not \[0, 0\]"),
    ],
)
def test_choices_that_are_no_tree_are_refused(tree: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        SamplingParams(tree=tree)


def test_choices_have_their_own_size() -> None:
    with pytest.raises(InputError, match="leave them out"):
        SamplingParams(tree=[1, 2], gamma=3)


def test_the_kernels_know_every_shape() -> None:
    for name, make in BUILDERS.items():
        builder = make(SamplingParams(tree=[1, 2] if name == "choices" else name), lambda: [0.5])
        assert builder.shape(2, 3) is not None, name
    assert Static([0.5, 0.2]).shape(2, 3) == ("fixed", 1, 1, (1, 3, 4, 4, 4))
