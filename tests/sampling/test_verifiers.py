from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sakiyomi import SamplingParams
from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import DRAFT_KINDS, Draft, Draw, TokenTree
from sakiyomi.kernels.build import native
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import VERIFIERS, Rows, Verifier, check_fits, choose_verifier
from sakiyomi.sampling.verifiers.ratio import residual
from target_rows import TableRows

V = 8


class Fixed(RequestNoise):
    """Uniforms as told, and then no more."""

    def __init__(self, *values: float) -> None:
        super().__init__(0)
        self.values = list(values)

    def uniform(self) -> float:
        return self.values.pop(0)


def one_hot(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), V).float()


def tree_draft(tokens: tuple[int, ...], parents: tuple[int, ...], kind: str = "point_mass") -> Draft:
    return Draft(TokenTree(tokens, parents), kind, tuple(Draw(i, "d") for i in range(len(tokens))))  # type: ignore[arg-type]


#   0:1     3:2
#  1:3 2:4   4:5
WIDE = tree_draft((1, 3, 4, 2, 5), (-1, 0, 0, -1, 3))


TREES = [verifier for verifier in VERIFIERS.values() if "point_mass" in verifier.takes]


def test_every_verifier_says_what_it_is() -> None:
    for name, verifier in VERIFIERS.items():
        assert verifier.name == name
        assert verifier.rule in ("greedy", "ratio", "coupled")
        assert verifier.takes <= DRAFT_KINDS
        assert isinstance(verifier.lossless, bool)


@pytest.mark.parametrize("verifier", TREES, ids=lambda verifier: verifier.name)
@pytest.mark.parametrize(
    ("choices", "path", "token", "kind", "refused"),
    [
        ((1, 4, 0, 7, 0, 0), (0, 2), 7, "bonus", (1,)),
        ((1, 3, 6, 0, 0, 0), (0, 1), 6, "bonus", ()),
        ((1, 0, 0, 0, 0, 0), (0,), 0, "recovered", (1, 2)),
        ((2, 0, 0, 0, 5, 4), (3, 4), 4, "bonus", (0,)),
        ((7, 0, 0, 0, 0, 0), (), 7, "recovered", (0, 3)),
    ],
)
def test_one_hot_rows_leave_no_choice(
    verifier: Verifier, choices: tuple[int, ...], path: tuple[int, ...], token: int, kind: str, refused: tuple[int, ...]
) -> None:
    """At one-hot rows all rules are the greedy one, siblings tried in the order drawn."""
    for seed in range(20):
        verdict = verifier.verify(WIDE, TableRows(one_hot(*choices), 5), RequestNoise(seed))
        assert (verdict.path, verdict.token, verdict.kind, verdict.refused) == (path, token, kind, refused)


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=list(VERIFIERS))
def test_empty_draft_is_a_plain_step(verifier: Verifier) -> None:
    verdict = verifier.verify(Draft.empty(), TableRows(one_hot(3), 0), RequestNoise(0))
    assert (verdict.path, verdict.token, verdict.kind, verdict.refused) == ((), 3, "plain", ())


@pytest.mark.parametrize("verifier", TREES, ids=lambda verifier: verifier.name)
def test_greedy_rows_from_logits(verifier: Verifier) -> None:
    """Temperature 0 through the sampler: the general rules agree with the fast one."""
    sampler = Sampler(SamplingParams(), V)
    generator = torch.Generator().manual_seed(1)
    for seed in range(50):
        logits = torch.randn(6, V, generator=generator)
        greedy = VERIFIERS["greedy"].verify(WIDE, Rows(logits, sampler, 3), RequestNoise(seed))
        assert verifier.verify(WIDE, Rows(logits, sampler, 3), RequestNoise(seed)) == greedy
        best = logits.argmax(-1).tolist()
        assert greedy.token == best[(greedy.path or (-1,))[-1] + 1]


# The ratio rule, by hand

TARGET = torch.tensor([[0.5, 0.3, 0.2, 0, 0, 0, 0, 0], [0, 0, 1.0, 0, 0, 0, 0, 0]])
DRAFT = torch.tensor([[0.1, 0.8, 0.1, 0, 0, 0, 0, 0]])


def test_ratio_accepts_below_p_over_q() -> None:
    draft = Draft.chain([1], "d", DRAFT)
    rows = TableRows(TARGET, 0)
    # 0.3 / 0.8 = 0.375
    accepted = VERIFIERS["ratio"].verify(draft, rows, Fixed(0.374, 0.5))
    assert (accepted.path, accepted.token, accepted.kind) == ((0,), 2, "bonus")
    # The residual is (0.4, 0, 0.1), normalised (0.8, 0, 0.2).
    for uniform, token in ((0.0, 0), (0.79, 0), (0.81, 2), (0.999, 2)):
        refused = VERIFIERS["ratio"].verify(draft, rows, Fixed(0.376, uniform))
        assert (refused.path, refused.token, refused.kind, refused.refused) == ((), token, "recovered", (0,))


def test_ratio_always_accepts_where_p_is_at_least_q() -> None:
    draft = Draft.chain([0], "d", DRAFT)
    verdict = VERIFIERS["ratio"].verify(draft, TableRows(TARGET, 0), Fixed(1 - 2**-53, 0.5))
    assert verdict.path == (0,)


def test_ratio_never_accepts_what_the_target_excludes() -> None:
    draft = Draft.chain([7], "d", torch.full((1, V), 1 / V))
    verdict = VERIFIERS["ratio"].verify(draft, TableRows(TARGET, 0), Fixed(0.0, 0.5))
    assert verdict.path == ()


def test_residual_by_hand() -> None:
    p, q = TARGET[0].numpy(), DRAFT[0].numpy()
    assert residual(p, q, 1) == pytest.approx([0.8, 0, 0.2, 0, 0, 0, 0, 0])
    assert residual(p, None, 0) == pytest.approx([0, 0.6, 0.4, 0, 0, 0, 0, 0])
    # p and q equal but for rounding: p without the refused token.
    assert residual(p, p, 0) == pytest.approx([0, 0.6, 0.4, 0, 0, 0, 0, 0])
    assert residual(p, p * np.float32(1 - 1e-8), 0) == pytest.approx([0, 0.6, 0.4, 0, 0, 0, 0, 0])
    # Nothing else is left at all.
    alone = one_hot(4)[0].numpy()
    assert residual(alone, alone, 4) == pytest.approx(alone)
    assert residual(alone, None, 4) == pytest.approx(alone)
    assert p.tolist() == TARGET[0].tolist()


def test_point_masses_are_removed_one_after_another() -> None:
    draft = tree_draft((0, 1), (-1, -1))
    rows = TableRows(torch.cat([TARGET, TARGET[1:]]), 0)
    ratio = VERIFIERS["ratio"]
    # 0 stays with 0.5; then 1 with 0.3 / 0.5; then 2 is all that is left.
    assert ratio.verify(draft, rows, Fixed(0.49, 0.5)).path == (0,)
    assert ratio.verify(draft, rows, Fixed(0.51, 0.59, 0.5)).path == (1,)
    last = ratio.verify(draft, rows, Fixed(0.51, 0.61, 0.5))
    assert (last.path, last.token, last.refused) == ((), 2, (0, 1))


def test_siblings_without_replacement_use_what_is_left_of_q() -> None:
    """After 1 is refused p is (0.8, 0, 0.2) and q, drawn without 1, (0.5, 0, 0.5): 2 stays with 0.4."""
    draft = Draft(TokenTree((1, 2), (-1, -1)), "without_replacement", (Draw(0, "d", 0), Draw(1, "d", 0)), DRAFT)
    rows = TableRows(torch.cat([TARGET, TARGET[1:]]), 0)
    assert VERIFIERS["ratio"].verify(draft, rows, Fixed(0.376, 0.39, 0.5)).path == (1,)
    refused = VERIFIERS["ratio"].verify(draft, rows, Fixed(0.376, 0.41, 0.5))
    assert (refused.path, refused.token, refused.refused) == ((), 0, (0, 1))


def test_independent_siblings_use_all_of_q() -> None:
    """After 1 is refused p is (0.8, 0, 0.2), q still (0.1, 0.8, 0.1): 2 stays for certain."""
    draft = Draft(TokenTree((1, 2), (-1, -1)), "iid", (Draw(0, "d", 0), Draw(1, "d", 0)), DRAFT)
    rows = TableRows(torch.cat([TARGET, TARGET[1:]]), 0)
    assert VERIFIERS["ratio"].verify(draft, rows, Fixed(0.376, 0.999, 0.5)).path == (1,)


def test_token_drawn_twice_is_refused_twice() -> None:
    draft = Draft(TokenTree((1,), (-1,)), "iid", (Draw(0, "d", 0), Draw(0, "d", 0)), DRAFT)
    verdict = VERIFIERS["ratio"].verify(draft, TableRows(TARGET, 0), Fixed(0.376, 0.0, 0.9))
    # Refused once means that the residual has none of it: not even a uniform of 0 accepts it then.
    assert (verdict.path, verdict.refused) == ((), (0,))


def test_row_that_cannot_have_been_drawn_from_counts_as_point_mass() -> None:
    draft = Draft.chain([2], "d", one_hot(1))
    rows = TableRows(TARGET, 0)
    assert VERIFIERS["ratio"].verify(draft, rows, Fixed(0.19, 0.5)).path == (0,)
    assert VERIFIERS["ratio"].verify(draft, rows, Fixed(0.21, 0.5)).path == ()


def test_uniforms_are_not_shared() -> None:
    """One for each acceptance, one more for the token that follows."""
    noise = Fixed(0.0, 0.0, 0.5)
    draft = Draft.chain([0, 2], "d", torch.cat([DRAFT, DRAFT]))
    VERIFIERS["ratio"].verify(draft, TableRows(torch.cat([TARGET, TARGET[1:]]), 0), noise)
    assert noise.values == []


def test_ratio_refuses_another_vocabulary() -> None:
    draft = Draft.chain([1], "d", torch.full((1, V + 2), 1 / (V + 2)))
    with pytest.raises(InputError, match="over 10 tokens, the target's over 8"):
        VERIFIERS["ratio"].verify(draft, TableRows(TARGET, 0), RequestNoise(0))


# Block and traversal verification, by hand

P = torch.tensor([[0.5, 0.3, 0.2, 0, 0, 0, 0, 0], [0, 0.6, 0.4, 0, 0, 0, 0, 0], [0, 0, 0, 1.0, 0, 0, 0, 0]])
Q = torch.tensor([[0.1, 0.6, 0.3, 0, 0, 0, 0, 0], [0, 0.3, 0.7, 0, 0, 0, 0, 0]])
CHAINS = [VERIFIERS["block"], VERIFIERS["traversal"]]


@pytest.mark.parametrize("rule", CHAINS, ids=lambda rule: rule.name)
def test_a_good_token_saves_the_doubtful_one_before_it(rule: Verifier) -> None:
    """1 alone would stay with .3 / .6; with 1 after it, of twice the draft's probability, both stay for certain."""
    verdict = rule.verify(Draft.chain([1, 1], "d", Q), TableRows(P, 0), Fixed(1 - 2**-53, 0.5))
    assert (verdict.path, verdict.token, verdict.kind) == ((0, 1), 3, "bonus")


@pytest.mark.parametrize("rule", CHAINS, ids=lambda rule: rule.name)
def test_levels_by_hand(rule: Verifier) -> None:
    """The chain 1, 2 stays with .5 * .4 / .7 = .2857.

    Else 1 stays with S / (S + 1 - .5), S = max(.5 * .6 - .3, 0) + max(.5 * .4 - .7, 0) = 0: never, and what is left at
    the root is max(p - q, 0) = (.4, 0, 0) alone.
    """
    draft, rows = Draft.chain([1, 2], "d", Q), TableRows(P, 0)
    assert rule.verify(draft, rows, Fixed(0.285, 0.5)).path == (0, 1)
    refused = rule.verify(draft, rows, Fixed(0.286, 0.01, 0.999))
    assert (refused.path, refused.token, refused.kind, refused.refused) == ((), 0, "recovered", (0,))
    # With another second row S = .5 * .6 - .1 = .2: 1 stays with .2 / .7 = .2857, and 1 follows it.
    other = torch.stack([Q[0], torch.tensor([0, 0.1, 0.9, 0, 0, 0, 0, 0])])
    kept = rule.verify(Draft.chain([1, 2], "d", other), rows, Fixed(0.99, 0.285, 0.5))
    assert (kept.path, kept.token, kept.kind, kept.refused) == ((0,), 1, "recovered", (1,))
    assert rule.verify(Draft.chain([1, 2], "d", other), rows, Fixed(0.99, 0.287, 0.5)).path == ()


@pytest.mark.parametrize("rule", CHAINS, ids=lambda rule: rule.name)
def test_a_token_that_the_target_excludes_ends_the_chain(rule: Verifier) -> None:
    """Rows behind it are not read, and it costs no uniform."""
    rows = TableRows(P, 0)
    rows._probs.pop(1)
    rows._probs.pop(2)
    verdict = rule.verify(Draft.chain([7, 1], "d", torch.full((2, V), 1 / V)), rows, Fixed(0.5))
    assert (verdict.path, verdict.kind, verdict.refused) == ((), "recovered", (0,))


@pytest.mark.parametrize("rule", CHAINS, ids=lambda rule: rule.name)
def test_draws_may_stand_in_any_order(rule: Verifier) -> None:
    """Only those of one place have to stand as they were drawn; rows too may lie anyhow."""
    plain = Draft.chain([1, 2], "d", Q)
    mixed = Draft(plain.tree, "chain", (Draw(1, "d", 0), Draw(0, "d", 1)), Q.flip(0))
    for seed in range(100):
        rows = TableRows(P, 0)
        assert rule.verify(mixed, rows, RequestNoise(seed)) == rule.verify(plain, rows, RequestNoise(seed))


def test_traversal_keeps_a_sibling_whose_subtree_failed() -> None:
    """Leaf first: 3 behind 1 is refused for certain, then 1 itself is judged, then its sibling 2."""
    tree = TokenTree((1, 7, 2), (-1, 0, -1))
    draft = Draft(tree, "point_mass", tuple(Draw(node, "d") for node in range(3)))
    rows = TableRows(torch.cat([P, one_hot(5)]), 0)
    # 1 stays with .3: nothing is lost of it by 7, which was impossible.
    assert VERIFIERS["traversal"].verify(draft, rows, Fixed(0.29, 0.5)).path == (0,)
    # After that 2 stays with .2 / .7.
    kept = VERIFIERS["traversal"].verify(draft, rows, Fixed(0.31, 0.28, 0.5))
    assert (kept.path, kept.token, kept.refused) == ((2,), 5, (0,))
    refused = VERIFIERS["traversal"].verify(draft, rows, Fixed(0.31, 0.29, 0.5))
    assert (refused.path, refused.token, refused.refused) == ((), 0, (0, 2))


@pytest.mark.parametrize("rule", CHAINS, ids=lambda rule: rule.name)
def test_equal_rows_but_for_rounding(rule: Verifier) -> None:
    """Nothing can be refused; a uniform as large as can be must not lead into a residual of rounding errors."""
    p = torch.softmax(torch.randn(3, V, generator=torch.Generator().manual_seed(3)), -1)
    q = (p[:2] * (1 + 1e-7)).clone()
    for seed in range(200):
        verdict = rule.verify(Draft.chain([1, 2], "d", q), TableRows(p, 0), RequestNoise(seed))
        assert verdict.path == (0, 1)


def test_a_chain_of_a_thousand_tokens() -> None:
    """No recursion."""
    rows = torch.full((2001, V), 1 / V)
    for name in ("block", "traversal"):
        verdict = VERIFIERS[name].verify(Draft.chain([3] * 2000, "d", rows[:2000]), TableRows(rows, 0), RequestNoise(0))
        assert len(verdict.path) == 2000


# The coupled rule


def random_probs(rows: int, seed: int) -> torch.Tensor:
    return torch.softmax(torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2, -1)


def test_coupled_keys_by_depth() -> None:
    probs = random_probs(6, 3)
    for seed in range(30):
        verdict = VERIFIERS["coupled"].verify(WIDE, TableRows(probs, 10), RequestNoise(seed, 4))
        noise = RequestNoise(seed, 4)
        node = -1
        for depth, step in enumerate([*verdict.path, None]):
            scores = probs[node + 1].double().log() + noise.gumbel(10 + depth, V).double()
            token = int(scores.argmax())
            assert token == (verdict.token if step is None else WIDE.tree.tokens[step])
            node = step if step is not None else node


def test_coupled_with_long_rows_and_support() -> None:
    logits = torch.randn(2, 32000, generator=torch.Generator().manual_seed(0)) * 3
    for options in ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}):
        sampler = Sampler(SamplingParams(temperature=0.8, **options), 32000)  # type: ignore[arg-type]
        for seed in range(5):
            rows = Rows(logits[:1], sampler, 7)
            verdict = VERIFIERS["coupled"].verify(Draft.empty(), rows, RequestNoise(seed))
            scores = rows.probs()[0].double().log() + RequestNoise(seed).gumbel(7, 32000).double()
            assert verdict.token == int(scores.argmax())


# Rows


def test_rows_are_the_samplers() -> None:
    few_are_known = native() is not None
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.7, top_k=9, repetition_penalty=1.3, logit_bias={5: 1.0})
    sampler = Sampler(params, 64)
    paths = [WIDE.tree.path_tokens(node) for node in range(-1, 5)]
    processed = sampler.process(logits, paths, [7, 9])
    rows = Rows(logits, sampler, 2, WIDE.tree, [7, 9])
    assert len(rows) == 6
    assert np.array_equal(rows.row(4), sampler.probs(processed)[4].numpy())
    if few_are_known:  # else nobody knows that they are few
        assert np.array_equal(rows.support(4), np.flatnonzero(rows.row(4)))
    assert torch.equal(rows.logits, processed)
    assert torch.equal(rows.probs(), sampler.probs(processed))
    assert np.array_equal(rows.row(2), rows.probs()[2].numpy())
    assert [rows.best(row) for row in range(6)] == processed.argmax(-1).tolist()
    assert rows.row(1) is rows.row(1)


def test_rows_compute_only_what_is_read() -> None:
    seen: list[list[int]] = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    sampler = Sampler(SamplingParams(temperature=1.0, logits_processors=[note]), V)
    logits = torch.full((6, V), -math.inf)
    logits[0, 1] = logits[1, 4] = logits[3, 0] = 0.0
    verdict = VERIFIERS["ratio"].verify(WIDE, Rows(logits, sampler, 1, WIDE.tree, [6]), RequestNoise(0))
    assert verdict.path == (0, 2)
    assert seen == [[6], [6, 1], [6, 1, 4]]


def test_nan_logits_are_refused() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)):
        rows = Rows(torch.full((1, V), math.nan), Sampler(params, V), 0)
        verifier = VERIFIERS["greedy" if params.greedy else "ratio"]
        with pytest.raises(InputError, match="not a number"):
            verifier.verify(Draft.empty(), rows, RequestNoise(0))


# Choosing


def test_choose_verifier() -> None:
    sampled = SamplingParams(temperature=1.0)
    seeded = SamplingParams(temperature=1.0, seed=1)
    assert choose_verifier(SamplingParams(acceptance="coupled"), "chain").name == "greedy"
    assert choose_verifier(sampled, "chain").name == "block"
    assert choose_verifier(sampled, "point_mass").name == "ratio"
    for kind in ("iid", "without_replacement", "merged"):
        assert choose_verifier(sampled, kind).name == "coupled"  # type: ignore[arg-type]
    for kind in DRAFT_KINDS:
        assert choose_verifier(seeded, kind).name == "coupled"
        assert choose_verifier(SamplingParams(temperature=1.0, seed=1, acceptance="ratio"), kind).name == "ratio"
    # Where nothing is drafted every rule fits.
    for rule in ("ratio", "coupled", "block", "traversal"):
        assert choose_verifier(SamplingParams(temperature=1.0, acceptance=rule), None).name == rule
    with pytest.raises(
        InputError, match=r'"block" does not take a draft of kind "iid".*"ratio", "coupled", "traversal"'
    ):
        choose_verifier(SamplingParams(temperature=1.0, acceptance="block"), "iid")


def test_check_fits_names_the_alternatives() -> None:
    class ChainsOnly:
        name = "chains"
        lossless = True
        takes = frozenset({"chain"})

    check_fits("chain", ChainsOnly())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r'"chains" does not take a draft of kind "iid".*"ratio", "coupled"'):
        check_fits("iid", ChainsOnly())  # type: ignore[arg-type]
