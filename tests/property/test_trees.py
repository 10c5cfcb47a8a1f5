from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.core.tree import Draft, Draw, TokenTree
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.verifiers import VERIFIERS
from target_rows import TableRows

V = 6


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> TokenTree:
    size = draw(st.integers(0, most))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    tokens = tuple(draw(st.integers(0, V - 1)) for _ in range(size))
    return TokenTree(tokens, parents)


@given(st.lists(st.integers(0, V - 1), max_size=12))
def test_mask_of_a_chain_is_lower_triangular(tokens: list[int]) -> None:
    chain = TokenTree.chain(tokens)
    mask = chain.mask()
    assert torch.equal(mask, torch.ones(len(tokens), len(tokens)).tril().bool())
    assert mask.sum(1).tolist() == [depth + 1 for depth in chain.depths()]


@given(trees())
def test_any_tree_hangs_together(tree: TokenTree) -> None:
    tree.validate(V)
    mask = tree.mask()
    assert mask.dtype == torch.bool
    assert mask.sum(1).tolist() == [depth + 1 for depth in tree.depths()]
    assert torch.equal(mask, mask & torch.ones(len(tree), len(tree)).tril().bool())
    for node, parent in enumerate(tree.parents):
        assert tree.path(node) == (*tree.path(parent), node)
        assert tree.path_tokens(node)[-1] == tree.tokens[node]
        assert node in tree.children(parent)
        assert mask[node].nonzero().flatten().tolist() == list(tree.path(node))
    assert sum(len(tree.children(node)) for node in range(-1, len(tree))) == len(tree)


@given(trees(), st.integers(0, 2**32))
def test_verdicts_are_walks_of_the_tree(tree: TokenTree, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(len(tree) + 1, V, generator=generator), -1)
    draft = Draft(tree, "point_mass", tuple(Draw(node, "d") for node in range(len(tree))))
    draft.validate(V)
    for verifier in VERIFIERS.values():
        if draft.judged_as not in verifier.takes:
            continue
        verdict = verifier.verify(draft, TableRows(probs, 3), RequestNoise(seed))
        end = verdict.path[-1] if verdict.path else -1
        assert verdict.path == tree.path(end)
        assert 0 <= verdict.token < V
        below = tree.children(end)
        assert verdict.kind == ("plain" if not len(tree) else "recovered" if below else "bonus")
        assert set(below) <= set(verdict.refused)
        assert not set(verdict.refused) & set(verdict.path)
        assert len(set(verdict.refused)) == len(verdict.refused)
        # The token that follows is none that was refused there for being another.
        if verifier.rule != "ratio":
            assert verdict.token not in {tree.tokens[child] for child in below}


@given(trees(), trees(), st.integers(0, 2**32), st.integers(0, 100))
def test_coupled_text_does_not_depend_on_the_tree(first: TokenTree, second: TokenTree, seed: int, start: int) -> None:
    """Twelve tokens of a table model, once with each tree proposed in every round."""
    table = torch.softmax(torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 2, -1).numpy()
    texts = []
    for tree in (first, second, TokenTree()):
        draft = Draft(tree, "point_mass", tuple(Draw(node, "d") for node in range(len(tree))))
        noise = RequestNoise(seed, start)
        tokens = [0]
        while len(tokens) <= 12:
            rows = TableRows(table[[tokens[-1], *tree.tokens]], start + len(tokens))
            verdict = VERIFIERS["coupled"].verify(draft, rows, noise)
            tokens += [*(tree.tokens[node] for node in verdict.path), verdict.token]
        texts.append(tokens[1:13])
    assert texts[0] == texts[1] == texts[2]
