"""The published tables and checks, as figures."""

from __future__ import annotations

import math

import pytest

from sakiyomi import theory
from sakiyomi.core.errors import InputError

# Leviathan et al. 2023, table 2, T5-XXL 11B: draft's c, gamma, alpha, predicted ("Exp") speed-up.
SMALL, BASE, LARGE = 0.02, 0.04, 0.11
T5_XXL = [
    (SMALL, 7, 0.75, 3.16),
    (BASE, 7, 0.80, 3.25),
    (LARGE, 7, 0.82, 2.50),
    (SMALL, 7, 0.62, 2.26),
    (BASE, 5, 0.68, 2.35),
    (LARGE, 3, 0.71, 1.93),
    (SMALL, 5, 0.65, 2.40),
    (BASE, 5, 0.73, 2.62),
    (LARGE, 3, 0.74, 2.02),
    (SMALL, 5, 0.53, 1.89),
    (BASE, 3, 0.55, 1.80),
    (LARGE, 3, 0.56, 1.54),
]

# Best gamma and its speed-up by alpha and c, verified on a grid.
COSTS = (0.01, 0.02, 0.05, 0.10, 0.20, 0.30)
OPTIMAL = {
    0.5: ((5, 1.88), (4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25), (1, 1.15)),
    0.6: ((7, 2.30), (6, 2.17), (4, 1.92), (3, 1.67), (2, 1.40), (1, 1.23)),
    0.7: ((9, 2.97), (8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58), (2, 1.37)),
    0.8: ((14, 4.23), (11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87), (3, 1.55)),
    0.9: ((24, 7.49), (19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37), (5, 1.87)),
}


@pytest.mark.parametrize(("c", "gamma", "alpha", "published"), T5_XXL)
def test_predicted_column_of_t5_xxl(c: float, gamma: int, alpha: float, published: float) -> None:
    # Half a digit of the print; the alphas in print are rounded too, which moves the prediction by up to a hundredth.
    assert theory.speedup(alpha, gamma, c) == pytest.approx(published, abs=0.016)


@pytest.mark.parametrize("alpha", sorted(OPTIMAL))
@pytest.mark.parametrize("column", range(len(COSTS)))
def test_optimal_gamma_grid(alpha: float, column: int) -> None:
    c = COSTS[column]
    gamma, speed = OPTIMAL[alpha][column]
    assert theory.optimal_gamma(alpha, c) == gamma
    assert theory.speedup(alpha, gamma, c) == pytest.approx(speed, abs=0.006)
    assert max(range(60), key=lambda g: theory.speedup(alpha, g, c)) == gamma


@pytest.mark.parametrize(
    ("alpha", "gamma", "speed", "operations"), [(0.6, 2, 1.96, 1.53), (0.8, 5, 3.69, 1.63), (0.9, 10, 6.86, 1.60)]
)
def test_operations(alpha: float, gamma: int, speed: float, operations: float) -> None:
    """Leviathan et al. 2023, table 1, with a draft that costs nothing."""
    assert theory.speedup(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.006)
    assert theory.operations_ratio(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.006)


def test_lamda() -> None:
    """Leviathan et al. 2023, table 3, LaMDA 137B: what its drafts of 100M, 2B and 8B could bring if they were free."""
    for (greedy, sampled), most in (((0.61, 0.57), 2.56), ((0.71, 0.71), 3.45), ((0.75, 0.74), 4.0)):
        assert theory.expected_tokens(greedy, 200) == pytest.approx(most, abs=0.006)
        assert theory.expected_tokens(sampled, 200) <= theory.expected_tokens(greedy, 200)
    # With c as the ratio of parameters the one in the middle is the best.
    best = [
        theory.speedup(alpha, theory.optimal_gamma(alpha, c), c)
        for alpha, c in ((0.61, 0.1 / 137), (0.71, 2 / 137), (0.75, 8 / 137))
    ]
    assert best.index(max(best)) == 1


def test_chinchilla() -> None:
    """Chen et al. 2023 (arXiv 2302.01318), table 1: 14.1 ms a token, 1.8 ms a draft token, K = 4."""
    c = 1.8 / 14.1
    for milliseconds, published in ((7.52, 1.92), (7.00, 2.01), (5.73, 2.46)):
        tokens = published * (4 * c + 1)
        alpha = theory.alpha_of(tokens, 4)
        assert 0.6 < alpha < 0.95
        # 14.1 and the times a token are rounded in print.
        assert 14.1 / theory.speedup(alpha, 4, c) == pytest.approx(milliseconds, rel=0.03)


def test_verification_is_not_free() -> None:
    """The jump of float32 on a CPU comes at the second token: short chains lose, longer ones pay."""
    fp32 = {1: 1.0, 2: 1.88, 5: 1.78, 8: 1.99, 16: 2.49}
    for gamma, pays in ((1, False), (4, True), (7, True)):
        tokens = theory.expected_tokens(0.8, gamma)
        speed = theory.round_speedup(tokens, gamma * 0.05, fp32[gamma + 1])
        assert speed == pytest.approx(tokens / (gamma * 0.05 + fp32[gamma + 1]))
        assert (speed > 1) is pays
    assert theory.round_speedup(theory.expected_tokens(0.8, 4), 0.2, 1.0) == theory.speedup(0.8, 4, 0.05)


def test_acceptance_by_place() -> None:
    assert theory.expected_chain_tokens([0.8], 3) == pytest.approx(theory.expected_tokens(0.8, 3))
    assert theory.expected_chain_tokens([0.5, 0.8], 3) == pytest.approx(1 + 0.5 + 0.4 + 0.32)
    assert theory.expected_chain_tokens([0.5], 0) == 1.0
    # Three rounds of 4: 4, 1 and 0 accepted. Behind a refusal nothing is counted.
    assert theory.positional_acceptance([4, 4, 4], [4, 1, 0]) == [2 / 3, 1 / 2, 1.0, 1.0]
    assert theory.positional_acceptance([2, 4], [2, 1]) == [1.0, 0.5]
    assert theory.positional_acceptance([1, 0], [0, 0]) == [0.0]
    assert theory.positional_acceptance([], []) == []


@pytest.mark.parametrize("gamma", [1, 3, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_alpha_of_is_the_inverse(alpha: float, gamma: int) -> None:
    assert theory.alpha_of(theory.expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-9)


def test_ways_to_draw() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    assert theory.total_variation(p, q) == pytest.approx(0.3)
    assert theory.guess_acceptance(p, q) == 0.3
    assert theory.matching_acceptance(p, q) == pytest.approx(0.1 + 0.15 + 0.06)
    assert theory.mean_acceptance([(p, q), (p, p)]) == pytest.approx((0.7 + 1.0) / 2)
    # The fact sheet's flat pair: drawing twice and comparing hardly ever agrees.
    flat = [1 / 1000] * 1000
    assert theory.acceptance(flat, flat) == pytest.approx(1.0)
    assert theory.matching_acceptance(flat, flat) == pytest.approx(0.001)
    assert theory.synchronous_alpha(0.8, 4) == pytest.approx(0.8**4)


def test_the_fastest_tree() -> None:
    """On a flat curve as many nodes as may be, on a steep one none; a measured step is not missed."""
    ranks = [0.7, 0.1, 0.05]
    paths, speed = theory.optimal_tree(ranks, 0.05, lambda rows: 1.0, 0.0, 12, 6)
    assert len(paths) == 12
    assert speed == pytest.approx(theory.expected_tree_tokens(ranks, paths) / (max(map(len, paths)) * 0.05 + 1))
    assert theory.optimal_tree(ranks, 0.05, lambda rows: float(rows), 0.0, 12, 6) == ([], 1.0)
    steps, _ = theory.optimal_tree(ranks, 0.05, lambda rows: 1.0 + (rows > 4) * 9.0, 0.0, 12, 6)
    assert len(steps) == 3
    assert theory.optimal_tree([1.0], 0.3, lambda rows: 1.0, 0.0, 5, 5)[0] == [
        (0,),
        (0, 0),
        (0, 0, 0),
        (0,) * 4,
        (0,) * 5,
    ]


def test_memory_traffic() -> None:
    """A pass reads weights once, however many tokens come of it; every request reads its own keys and values."""
    plain = theory.traffic(1.0, 0, weights=14e9, kv=1e9)
    assert (plain.weights, plain.kv, plain.total) == (14e9, 1e9, 15e9)
    drafted = theory.traffic(3.0, 4, weights=14e9, kv=1e9, draft_weights=0.2e9, draft_kv=0.01e9)
    assert drafted.weights / plain.weights == pytest.approx(theory.memory_ratio(3.0))
    assert drafted.draft_weights == pytest.approx(4 * 0.2e9 / 3)
    assert drafted.total == pytest.approx((14e9 + 1e9 + 4 * 0.21e9) / 3)
    eight = theory.traffic(1.0, 0, weights=14e9, kv=1e9, batch=8)
    assert (eight.weights, eight.kv) == (14e9 / 8, 1e9)
    # Llama 2 7B: 32 layers of 32 heads of 128 in 16 bits are half a MiB a token.
    assert theory.kv_bytes(32, 32, 128) == 2**19


def test_roofline() -> None:
    one = theory.pass_seconds(1, read=14e9, operations=14e9, bandwidth=1e12, rate=3e14)
    assert one == theory.pass_seconds(200, read=14e9, operations=14e9, bandwidth=1e12, rate=3e14) == 0.014
    assert theory.pass_seconds(600, read=14e9, operations=14e9, bandwidth=1e12, rate=3e14) == pytest.approx(0.028)
    assert theory.pass_seconds(600, read=14e9, operations=14e9, bandwidth=1e12) == 0.014


def test_bigram_draft() -> None:
    assert theory.speedup(0.20, 3, 0.0) == pytest.approx(1.25, abs=0.006)


def test_ends_of_the_range() -> None:
    assert theory.expected_tokens(1.0, 5) == 6.0
    assert theory.expected_tokens(0.0, 5) == 1.0
    # Plain generation is exactly one token a pass: whoever compares with 1 must not meet 0.9999999999999998.
    assert all(theory.expected_tokens(alpha / 100, 0) == 1.0 for alpha in range(101))
    assert theory.speedup(1.0, 4, 0.25) == pytest.approx(2.5)
    assert theory.operations_ratio(1.0, 3, 0.0) == 1.0
    # Near 1, where 1 - alpha^n over 1 - alpha cancels.
    assert theory.expected_tokens(1.0 - 1e-12, 9) == pytest.approx(10.0, rel=1e-9)
    assert theory.expected_tokens(math.nextafter(1.0, 0.0), 9) == pytest.approx(10.0, rel=1e-9)


def test_no_draft_where_it_does_not_pay() -> None:
    assert theory.optimal_gamma(0.3, 0.3) == 0
    assert theory.optimal_gamma(0.3, 0.5) == 0
    assert theory.optimal_gamma(0.0, 0.0) == 0
    assert theory.optimal_gamma(1.0, 1.0) == 0
    # Corollary 3.9: if alpha > c, some gamma helps, by (1 + alpha) / (1 + c) at least.
    gamma = theory.optimal_gamma(0.31, 0.3)
    assert theory.speedup(0.31, gamma, 0.3) >= 1.31 / 1.3


def test_acceptance() -> None:
    assert theory.acceptance([0.5, 0.5, 0.0], [0.25, 0.25, 0.5]) == 0.5
    assert theory.acceptance([1.0, 0.0], [0.0, 1.0]) == 0.0
    assert theory.acceptance([0.3, 0.7], [0.3, 0.7]) == 1.0
    assert isinstance(theory.acceptance([1], [1]), float)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.acceptance([0.5, 0.5], [1.0]),
        lambda: theory.acceptance([0.5, 0.4], [0.5, 0.5]),
        lambda: theory.acceptance([1.5, -0.5], [0.5, 0.5]),
        lambda: theory.acceptance([], []),
        lambda: theory.acceptance([math.nan, 1.0], [0.5, 0.5]),
        lambda: theory.expected_tokens(1.1, 3),
        lambda: theory.expected_tokens(-0.1, 3),
        lambda: theory.expected_tokens(math.nan, 3),
        lambda: theory.expected_tokens(0.5, -1),
        lambda: theory.expected_tokens(0.5, 1.5),  # type: ignore[arg-type]
        lambda: theory.speedup(0.5, 3, -0.1),
        lambda: theory.speedup(0.5, 3, math.nan),
        lambda: theory.operations_ratio(0.5, 3, math.inf),
        lambda: theory.optimal_gamma(0.5, 0.0),
        lambda: theory.optimal_gamma(1.0, 0.5),
        lambda: theory.optimal_gamma(2.0, 0.5),
        lambda: theory.mean_acceptance([]),
        lambda: theory.matching_acceptance([1.0], [0.5, 0.5]),
        lambda: theory.alpha_of(0.5, 3),
        lambda: theory.alpha_of(4.5, 3),
        lambda: theory.positional_acceptance([1], [2]),
        lambda: theory.positional_acceptance([1], []),
        lambda: theory.expected_chain_tokens([], 2),
        lambda: theory.round_speedup(0.5, 0.1, 1.0),
        lambda: theory.round_speedup(2.0, 0.1, 0.0),
        lambda: theory.round_speedup(math.nan, 0.1, 1.0),
        lambda: theory.synchronous_alpha(0.5, 0),
        lambda: theory.optimal_tree([0.5], -1.0, lambda rows: 1.0, 0.0, 3, 3),
        lambda: theory.optimal_tree([0.5], 0.1, lambda rows: 0.0, 0.0, 3, 3),
        lambda: theory.traffic(1.0, 1, weights=0.0),
        lambda: theory.kv_bytes(0, 1, 1),
        lambda: theory.pass_seconds(0, read=1.0, operations=1.0, bandwidth=1.0),
        lambda: theory.pass_seconds(1, read=1.0, operations=1.0, bandwidth=0.0),
        lambda: theory.marginal_gamma([], 0.1, lambda tokens: 1.0, 0.0, 4),
        lambda: theory.marginal_gamma([1.2], 0.1, lambda tokens: 1.0, 0.0, 4),
        lambda: theory.marginal_gamma([0.5], -0.1, lambda tokens: 1.0, 0.0, 4),
        lambda: theory.marginal_gamma([0.5], 0.1, lambda tokens: -1.0, 0.0, 4),
        lambda: theory.marginal_gamma([0.5], 0.1, lambda tokens: 1.0, 0.0, -1),
    ],
)
def test_outside_the_domain(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError):
        call()


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("c", [0.02, 0.1, 0.3])
def test_marginal_gamma_with_free_verification_is_optimal_gamma(alpha: float, c: float) -> None:
    gamma, speed = theory.marginal_gamma([alpha], c, lambda tokens: 1.0, 0.0, 60)
    assert gamma == theory.optimal_gamma(alpha, c)
    assert speed == pytest.approx(theory.speedup(alpha, gamma, c))


def test_marginal_gamma_sees_the_step_of_the_measured_curve() -> None:
    """float32 on a CPU: the second token costs nearly a whole pass, the next ones little. gamma 1 loses, 6 wins."""
    curve = {1: 1.0, 2: 1.88, 3: 1.85, 4: 1.80, 5: 1.78, 6: 1.85, 7: 1.92, 8: 1.99, 9: 2.05}
    gamma, speed = theory.marginal_gamma([0.8], 0.02, curve.__getitem__, 0.02, 8)
    assert gamma >= 4
    assert speed > 1.5
    one = 1.8 / (0.02 + curve[2] + 0.02)
    assert one < 1.0
    assert theory.marginal_gamma([0.8], 0.02, curve.__getitem__, 0.02, 1) == (0, 1.0)


def test_marginal_gamma_by_position() -> None:
    """Acceptance that falls with depth ends the draft sooner than its mean says."""
    falling = [0.9, 0.6, 0.1, 0.05]
    gamma, speed = theory.marginal_gamma(falling, 0.1, lambda tokens: 1.0, 0.0, 8)
    assert gamma == 2
    assert speed == pytest.approx((1 + 0.9 + 0.54) / 1.2)
    assert theory.marginal_gamma(falling, 0.1, lambda tokens: 1.0, 0.0, 0) == (0, 1.0)
    assert theory.marginal_gamma([0.05], 0.1, lambda tokens: 1.0, 0.0, 8) == (0, 1.0)


def test_overhead_can_switch_drafting_off() -> None:
    assert theory.marginal_gamma([0.4], 0.05, lambda tokens: 1.0, 0.0, 8)[0] > 0
    assert theory.marginal_gamma([0.4], 0.05, lambda tokens: 1.0, 1.0, 8) == (0, 1.0)
