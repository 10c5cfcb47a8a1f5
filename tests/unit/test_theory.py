"""The published tables and checks, as figures."""

from __future__ import annotations

import math

import pytest

from sakiyomi import theory
from sakiyomi.errors import InputError

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
