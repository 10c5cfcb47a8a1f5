"""Every lossless rule gives the target's distribution with the kinds of drafts it takes; every broken rule does not.

Odds of a false alarm: each test rejects at p < 1e-6, so a right rule with an unlucky seed fails one of the about 60
tests here once in 16 000 choices of the seed; the seed is fixed, so that a run that passes passes again. A broken rule
that went unnoticed would need a p above 1e-6; those here are at 1e-9 and below.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sakiyomi.core.tree import DRAFT_KINDS, Draft, Draw, TokenTree
from sakiyomi.kernels.build import native
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import draw
from sakiyomi.sampling.verifiers import VERIFIERS, Verifier
from statistical import broken, drafters
from statistical.harness import (
    LEVEL,
    START,
    Pair,
    Propose,
    Table,
    V,
    as_probs,
    counts,
    exact,
    generate,
    p_value,
    pair,
    run_rule,
)
from target_rows import TableRows

GAMMA = 2
LENGTH = GAMMA + 1
TABLES = ("far", "peaked", "truncated", "disjoint", "equal")


def proposals(tables: Pair) -> dict[str, Propose]:
    """Kind of draft -> a drafter of that kind."""
    draft, other = tables.draft, pair("truncated").draft
    return {
        "chain": drafters.chain(draft, GAMMA),
        "iid": drafters.iid_tree(draft, 2, GAMMA),
        "without_replacement": drafters.distinct_tree(draft, 2, GAMMA),
        "point_mass": drafters.point_mass_tree(draft, 2, GAMMA),
        "merged": drafters.merged(draft, other, GAMMA),
    }


# All kinds at the pair that is far apart and at the one with unlike supports; the extremes where residuals vanish or
# are the whole row. The coupled rule gives the same text for every draft, so that one kind stands for all.
CASES = [
    (rule, kind, table)
    for rule, verifier in VERIFIERS.items()
    if verifier.lossless and rule not in ("greedy", "coupled")
    for kind in sorted(verifier.takes)
    for table in TABLES
    if table in ("far", "truncated") or (kind, table) == ("merged", "peaked") or kind == "chain"
] + [("ratio", "without_replacement", "equal"), ("coupled", "iid", "truncated")]


def test_all_kinds_have_a_drafter_here() -> None:
    assert set(proposals(pair("far"))) == set(DRAFT_KINDS)
    for verifier in VERIFIERS.values():
        assert verifier.takes <= DRAFT_KINDS


@pytest.mark.parametrize(("rule", "kind", "table"), CASES)
def test_lossless(rule: str, kind: str, table: str) -> None:
    tables = pair(table)
    p = run_rule(f"{rule} {kind} {table}", tables, proposals(tables)[kind], VERIFIERS[rule], LENGTH)
    assert p > LEVEL


@pytest.mark.thorough
@pytest.mark.skipif(native() is None, reason="the kernels are not available")
@pytest.mark.parametrize(
    ("rule", "kind"),
    [("block", "chain"), ("coupled", "iid"), *(("ratio", kind) for kind in sorted(DRAFT_KINDS))],
)
def test_lossless_in_the_kernels(rule: str, kind: str) -> None:
    """The rules as the compiled kernels have them."""
    tables = pair("truncated")
    verifier = broken.Compiled(VERIFIERS[rule])
    assert run_rule(f"compiled {rule} {kind}", tables, proposals(tables)[kind], verifier, LENGTH) > LEVEL


@pytest.mark.skipif(native() is None, reason="the kernels are not available")
@pytest.mark.parametrize("fault", ["rows", "uniforms"])
def test_kernels_asked_wrongly_are_found(fault: str) -> None:
    """Rows of other nodes, or uniforms that come again in the next round."""
    tables = pair("far")
    verifier = broken.Compiled(VERIFIERS["ratio"], fault)
    name = f"compiled, wrong {fault}"
    assert run_rule(name, tables, proposals(tables)["chain"], verifier, LENGTH) < LEVEL


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_lossless_coupled_drafts(shape: str) -> None:
    """Drafts that look at the very noise that decides."""
    tables = pair("far")
    make = {
        "chain": drafters.coupled_chain(tables.draft, GAMMA),
        "tree": drafters.coupled_tree(tables.draft, 2, GAMMA),
    }
    assert run_rule(f"coupled {shape}", tables, make[shape], VERIFIERS["coupled"], LENGTH) > LEVEL


@pytest.mark.thorough
def test_coupled_text_is_the_same_for_every_draft() -> None:
    tables = pair("far")
    every = {
        **proposals(tables),
        "nothing": drafters.chain(tables.draft, 0),
        "long": drafters.coupled_chain(tables.draft, 7),
        "coupled tree": drafters.coupled_tree(tables.draft, 3, 3),
        "oracle": drafters.coupled_chain(tables.target, 4),
    }
    rounds: dict[str, list[int]] = {name: [] for name in every}
    for request in range(200):
        texts = {
            name: generate(tables.target, propose, VERIFIERS["coupled"], 12, RequestNoise(5, request), rounds[name])
            for name, propose in every.items()
        }
        assert len({tuple(text) for text in texts.values()}) == 1, (request, texts)
    taus = {name: sum(sizes) / len(sizes) for name, sizes in rounds.items()}
    print(taus)
    # It is the number of rounds that the draft decides.
    assert taus["nothing"] == 1.0
    assert taus["oracle"] == 5.0
    assert taus["coupled tree"] > taus["long"] > taus["chain"] > 1.0


def test_ratio_text_does_depend_on_the_draft() -> None:
    """What the coupled rule is for; were this to fail, the test above would show nothing."""
    tables = pair("far")
    texts = [
        [
            generate(
                tables.target, drafters.chain(tables.draft, gamma), VERIFIERS["ratio"], 12, RequestNoise(5, request)
            )
            for request in range(50)
        ]
        for gamma in (2, 4)
    ]
    assert sum(a == b for a, b in zip(*texts, strict=True)) < 5


@pytest.mark.thorough
@pytest.mark.parametrize("gamma", [1, 3])
def test_ratio_does_not_depend_on_gamma(gamma: int) -> None:
    """The text under one seed does, its distribution does not."""
    tables = pair("far")
    assert (
        run_rule(f"ratio gamma {gamma}", tables, drafters.chain(tables.draft, gamma), VERIFIERS["ratio"], LENGTH)
        > LEVEL
    )


@pytest.mark.thorough
def test_ratio_with_many_siblings() -> None:
    """Without replacement until the draft's support of five is used up: the last is tried for certain."""
    tables = pair("truncated")
    propose = drafters.distinct_tree(tables.draft, 6, 1)
    assert run_rule("ratio six siblings", tables, propose, VERIFIERS["ratio"], 2) > LEVEL


def test_on_a_chain_traversal_is_block_verification() -> None:
    """Two pieces of code, one rule: the same verdicts from the same uniforms."""
    for name in TABLES:
        tables = pair(name)
        for gamma in (1, 2, 4):
            propose = drafters.chain(tables.draft, gamma)
            for request in range(200):
                draft = propose(START, 1, RequestNoise(3, request))
                rows = TableRows(tables.target[[START, *draft.tree.tokens]], 1)
                block, traversal = (
                    VERIFIERS[rule].verify(draft, rows, RequestNoise(4, request)) for rule in ("block", "traversal")
                )
                assert block == traversal


@pytest.mark.few(1)
@pytest.mark.parametrize("table", ["far", "truncated"])
@pytest.mark.parametrize("gamma", [2, 4])
def test_block_accepts_what_theory_says_and_never_less_than_ratio(table: str, gamma: int) -> None:
    """The mean number of accepted tokens of both rules, by enumeration of all chains, and measured."""
    tables = pair(table)
    expected = {"ratio": 0.0, "block": 0.0}
    for text in itertools.product(range(V), repeat=gamma):
        chance, ratio, level, before = 1.0, 1.0, 1.0, START
        for depth, token in enumerate(text):
            p, q = float(tables.target[before, token]), float(tables.draft[before, token])
            if not q:
                break
            chance, before = chance * q, token
            ratio, level = ratio * min(1.0, p / q), min(1.0, level * p / q)
            # Chains that share this beginning: each gives its share.
            share = chance / V ** (gamma - depth - 1)
            expected["ratio"] += share * ratio
            expected["block"] += share * level
    assert expected["block"] > expected["ratio"] * 1.001
    samples, propose = 5000, drafters.chain(tables.draft, gamma)
    for rule, mean in expected.items():
        kept = []
        for request in range(samples):
            draft = propose(START, 1, RequestNoise(3, request))
            rows = TableRows(tables.target[[START, *draft.tree.tokens]], 1)
            kept.append(len(VERIFIERS[rule].verify(draft, rows, RequestNoise(4, request)).path))
        error = np.std(kept) / samples**0.5
        print(f"{rule}, {table}, gamma {gamma}: {np.mean(kept):.4f} accepted, expected {mean:.4f}")
        assert abs(np.mean(kept) - mean) < 5 * error


def grown(table: Table, nodes: int, cut: int | None = None) -> Propose:
    """A tree that grows one draw at a time, at the place that has the most probable path by then; whole levels cut."""

    def propose(token: int, position: int, noise: RequestNoise) -> Draft:
        stream = noise.fork("draft")
        tokens: list[int] = []
        parents: list[int] = []
        draws: list[Draw] = []
        contexts: list[int] = [token]
        row_of = {-1: 0}
        worth = {-1: 1.0}  # of drawing (once more) at a place
        for _ in range(nodes):
            place = max(worth, key=lambda node: worth[node])
            last = token if place < 0 else tokens[place]
            if place not in row_of:
                row_of[place] = len(contexts)
                contexts.append(last)
            drawn = draw(table[last], stream.uniform())
            node = next((n for n in range(len(tokens)) if parents[n] == place and tokens[n] == drawn), len(tokens))
            if node == len(tokens):
                tokens.append(drawn)
                parents.append(place)
                worth[node] = worth[place] * float(table[last, drawn])
            worth[place] *= 0.5
            draws.append(Draw(node, "draft", row_of[place]))
        draft = Draft(TokenTree(tuple(tokens), tuple(parents)), "iid", tuple(draws), as_probs(table, contexts))
        return draft if cut is None else draft.cut(cut)

    return propose


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["ratio", "traversal"])
@pytest.mark.parametrize("cut", [None, 2])
def test_trees_that_grow_by_what_was_drawn(rule: str, cut: int | None) -> None:
    """Where a token is drawn may depend on all earlier ones, and the engine may cut whole levels off at the end."""
    tables = pair("far")
    propose = grown(tables.draft, 6, cut)
    assert run_rule(f"{rule}, cut {cut}", tables, propose, VERIFIERS[rule], LENGTH) > LEVEL


@pytest.mark.thorough
def test_a_chain_cut_at_the_end_stays_lossless() -> None:
    """As the engine cuts at a request's end: the drafter gave more than there is room for."""
    tables = pair("far")
    long = drafters.chain(tables.draft, 5)

    def propose(token: int, position: int, noise: RequestNoise) -> Draft:
        return long(token, position, noise).cut(max(1, LENGTH - position))

    assert run_rule("block, cut", tables, propose, VERIFIERS["block"], LENGTH) > LEVEL


def broken_cases() -> dict[str, tuple[Propose, Verifier, int]]:
    tables = pair("far")
    chain, tree = drafters.chain(tables.draft, GAMMA), drafters.distinct_tree(tables.draft, 2, GAMMA)
    ratio, peaked = VERIFIERS["ratio"], pair("peaked").draft
    return {
        "always accept": (chain, broken.AlwaysAccept(), LENGTH),
        "resample from target": (chain, broken.ResampleFromTarget(), LENGTH),
        "shared uniform": (chain, broken.SharedUniform(), LENGTH),
        "bonus from draft": (chain, broken.BonusFromDraft(tables.draft), LENGTH),
        "bonus from wrong row": (chain, broken.BonusFromWrongRow(), LENGTH),
        "siblings without residual update": (
            drafters.iid_tree(tables.draft, 2, GAMMA),
            broken.SiblingsWithoutResidual(),
            LENGTH,
        ),
        "prune after drawing": (broken.prune_after_drawing(tables.draft, 4, 2), ratio, 2),
        "without replacement called independent": (broken.mislabelled(tree), ratio, LENGTH),
        "draft reports another temperature": (broken.sharpened(chain), ratio, LENGTH),
        "drafter takes the most probable and calls them drawn": (
            broken.top_tokens_called_drawn(tables.draft, 2),
            ratio,
            LENGTH,
        ),
        "merged nodes judged once": (
            drafters.merged(peaked, pair("peaked", 48).draft, 1),
            broken.NodesJudgedOnce(),
            2,
        ),
        "block with the ratio rule's residual": (
            drafters.chain(peaked, GAMMA),
            broken.BlockWithTokenResidual(),
            LENGTH,
        ),
        "block by the last token": (chain, broken.BlockByLastToken(), LENGTH),
        "prune after drawing, traversal": (
            broken.prune_after_drawing(tables.draft, 4, 2),
            VERIFIERS["traversal"],
            2,
        ),
        "traversal without residual update": (tree, broken.TraversalWithoutUpdate(), LENGTH),
        "traversal with the level of before": (tree, broken.TraversalWithOldLevel(), LENGTH),
        "coupled with wrong position key": (
            drafters.coupled_chain(tables.draft, GAMMA),
            broken.CoupledWithWrongKey(),
            LENGTH,
        ),
        "coupled keyed by row": (drafters.coupled_tree(tables.draft, 2, GAMMA), broken.CoupledByRow(), LENGTH),
    }


@pytest.mark.parametrize("name", sorted(broken_cases()))
def test_broken_rules_are_rejected(name: str) -> None:
    """With the samples that the real rules pass with."""
    propose, verifier, length = broken_cases()[name]
    peaked = name in ("merged nodes judged once", "block with the ratio rule's residual")
    assert run_rule(name, pair("peaked" if peaked else "far"), propose, verifier, length) < LEVEL


@pytest.mark.thorough
def test_first_token_alone_would_not_do() -> None:
    """Why the joint distribution is tested: with a wrong bonus row the first token is as it should be."""
    tables = pair("far")
    seen = counts(tables.target, drafters.chain(tables.draft, GAMMA), broken.BonusFromWrongRow(), 1)
    assert p_value(seen, exact(tables.target, 1))[0] > LEVEL
