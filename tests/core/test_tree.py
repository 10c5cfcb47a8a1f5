from __future__ import annotations

import numpy as np
import pytest
import torch

from sakiyomi.core.tree import Draft, Draw, TokenTree, Verdict, best_nodes

#        0       3
#      1   2     4
#      5
TREE = TokenTree((10, 11, 12, 13, 14, 15), (-1, 0, 0, -1, 3, 1))


def test_shape() -> None:
    assert len(TREE) == 6
    assert TREE.depths() == (0, 1, 1, 0, 1, 2)
    assert TREE.children(-1) == (0, 3)
    assert TREE.children(0) == (1, 2)
    assert TREE.children(5) == ()
    assert TREE.path(5) == (0, 1, 5)
    assert TREE.path(-1) == ()
    assert TREE.path_tokens(5) == (10, 11, 15)


def test_mask_is_self_and_ancestors() -> None:
    expected = torch.zeros(6, 6, dtype=torch.bool)
    for node in range(6):
        expected[node, list(TREE.path(node))] = True
    assert torch.equal(TREE.mask(), expected)


def test_chain() -> None:
    chain = TokenTree.chain([7, 8, 9])
    assert chain == TokenTree((7, 8, 9), (-1, 0, 1))
    assert chain.depths() == (0, 1, 2)
    assert torch.equal(chain.mask(), torch.ones(3, 3).tril().bool())


def test_empty() -> None:
    assert len(TokenTree()) == 0
    assert TokenTree().mask().shape == (0, 0)
    TokenTree().validate(8)
    Draft.empty().validate(8)
    assert len(Draft.empty()) == 0
    assert Draft.empty().draws_at(-1) == ()


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (TokenTree((1, 2), (-1,)), "2 tokens has 1 parents"),
        (TokenTree((1, 2), (1, -1)), "node 0 hangs from node 1"),
        (TokenTree((1, 2, 3), (-1, 2, 1)), "node 1 hangs from node 2"),
        (TokenTree((1,), (0,)), "node 0 hangs from node 0"),
        (TokenTree((1,), (-2,)), "node 0 hangs from node -2"),
        (TokenTree((-1,), (-1,)), "token -1"),
        (TokenTree((8,), (-1,)), "token 8, outside the vocabulary of 8"),
        (TokenTree((3.0,), (-1,)), "3.0 is a float"),  # type: ignore[arg-type]
        (TokenTree((np.int64(3),), (-1,)), "is a int64; tokens and parents are Python integers"),  # type: ignore[arg-type]
        (TokenTree((3,), (None,)), "None is a NoneType"),  # type: ignore[arg-type]
    ],
)
def test_bad_trees(tree: TokenTree, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tree.validate(8)


def test_draws_keep_their_order_and_may_share_a_node() -> None:
    tree = TokenTree((4, 5, 4), (-1, -1, 0))
    draft = Draft(
        tree,
        "iid",
        (Draw(1, "d", 0), Draw(0, "d", 0), Draw(1, "d", 0), Draw(2, "d", 1)),
        torch.full((2, 8), 1 / 8),
    )
    draft.validate(8)
    assert [draw.node for draw in draft.draws_at(-1)] == [1, 0, 1]
    assert [draw.node for draw in draft.draws_at(0)] == [2]
    assert draft.draws_at(2) == ()


def test_chain_drafts() -> None:
    drawn = Draft.chain([1, 2], "model", torch.full((2, 8), 1 / 8))
    drawn.validate(8)
    assert drawn.kind == "chain"
    assert [draw.row for draw in drawn.draws] == [0, 1]
    chosen = Draft.chain([1, 2], "ngram")
    chosen.validate(8)
    assert chosen.kind == "point_mass"
    assert [draw.row for draw in chosen.draws] == [None, None]
    # To a rule both are chains; siblings, or two draws of one token, are not.
    assert drawn.judged_as == chosen.judged_as == Draft.empty().judged_as == "chain"
    twice = Draft(TokenTree.chain([1]), "merged", (Draw(0, "a"), Draw(0, "b")))
    assert twice.judged_as == "merged"
    assert Draft(TokenTree((1, 2), (-1, -1)), "point_mass", (Draw(0, "a"), Draw(1, "a"))).judged_as == "point_mass"


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (Draft(TokenTree.chain([1]), "chain"), "nodes \\[0\\] have no draw"),
        (Draft(TokenTree.chain([1]), "chain", (Draw(1, "d"),)), "names node 1 of a tree of 1"),
        (Draft(TokenTree.chain([1]), "chain", (Draw(0, "d", 0),)), "row 0 of 0 rows"),
        (Draft(TokenTree.chain([1]), "guess", (Draw(0, "d"),)), "kind 'guess'"),  # type: ignore[arg-type]
        (Draft(TokenTree((1, 2), (-1, -1)), "chain", (Draw(0, "d"), Draw(1, "d"))), "a chain with parents"),
        (Draft(TokenTree.chain([1]), "point_mass", (Draw(0, "d", 0),), torch.ones(1, 8)), "point masses names rows"),
        (
            Draft(TokenTree((1, 2), (-1, -1)), "iid", (Draw(0, "d", 0), Draw(1, "d", 1)), torch.ones(2, 8)),
            "siblings under node -1 of kind 'iid'",
        ),
        (Draft(TokenTree.chain([1]), "chain", (Draw(0, "d"), Draw(0, "d"))), "has 2 draws"),
        (Draft.chain([1, 2], "d", torch.full((2, 8), 1 / 7)), "row 0 .* sums to 1.14286"),
        (Draft.chain([1], "d", torch.full((1, 8), torch.nan)), "sums to nan"),
        (Draft.chain([1], "d", torch.tensor([[1.5, -0.5, 0, 0, 0, 0, 0, 0]])), "has -0.5 as its least"),
        (Draft.chain([1], "d", torch.full((1, 8), torch.inf)), "sums to inf"),
        (Draft.chain([1], "d", torch.full((8,), 1 / 8)), r"shape \(8,\); expected a float tensor"),
        (Draft.chain([1], "d", torch.ones(1, 8, dtype=torch.int64)), "expected a float tensor"),
        (Draft.chain([1], "d", [[1 / 8] * 8]), "probabilities are list"),  # type: ignore[arg-type]
    ],
)
def test_bad_drafts(draft: Draft, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        draft.validate(8)


def test_only_rows_that_were_drawn_from_are_looked_at() -> None:
    """The draft model keeps rows of a place where it stopped."""
    probs = torch.cat([torch.full((1, 8), 1 / 8), torch.full((1, 8), torch.nan)])
    Draft(TokenTree.chain([1]), "chain", (Draw(0, "d", 0),), probs).validate(8)


def test_everything_is_frozen() -> None:
    for thing, name in (
        (TREE, "tokens"),
        (Draw(0, "d"), "node"),
        (Draft.empty(), "tree"),
        (Verdict((), 0, "plain"), "path"),
    ):
        with pytest.raises(AttributeError):
            setattr(thing, name, ())


def test_the_best_nodes_are_a_tree_of_their_own() -> None:
    """No node is worth more than its parent; of equal ones the earlier comes first, and so do parents."""
    tree = TokenTree((5, 6, 7, 8, 9), (-1, -1, 0, 1, 2))
    values = [0.5, 0.4, 0.5, 0.1, 0.5]
    assert best_nodes(values) == [0, 2, 4, 1, 3] and best_nodes(values, 2) == [0, 2] and best_nodes([], 3) == []
    kept = tree.keep(sorted(best_nodes(values, 4)))
    assert kept == TokenTree((5, 6, 7, 9), (-1, -1, 0, 2)) and not kept.is_chain
    assert tree.keep([0, 2, 4]) == TokenTree.chain([5, 7, 9]) and tree.keep([0, 2, 4]).is_chain
    assert tree.keep([]) == TokenTree() and TokenTree().is_chain
