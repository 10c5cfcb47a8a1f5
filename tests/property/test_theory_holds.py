"""Closed forms against table models: what the formulas say is what the rules do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi import theory
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.verifiers import VERIFIERS
from statistical import drafters
from statistical.harness import generate


@st.composite
def distributions(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    size = draw(st.integers(1, 30))
    rows = []
    for _ in range(2):
        weights = draw(st.lists(st.floats(0.0, 1.0), min_size=size, max_size=size).filter(lambda row: sum(row) > 1e-3))
        rows.append([weight / sum(weights) for weight in weights])
    return rows[0], rows[1]


@given(distributions())
def test_alpha_is_one_minus_total_variation(pair: tuple[list[float], list[float]]) -> None:
    p, q = pair
    distance = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    assert theory.acceptance(p, q) == pytest.approx(1 - distance, abs=1e-9)
    assert theory.acceptance(p, q) == theory.acceptance(q, p)


@given(st.floats(0.0, 1.0), st.integers(0, 60))
def test_expected_tokens_is_the_sum_of_powers(alpha: float, gamma: int) -> None:
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(sum(alpha**i for i in range(gamma + 1)), rel=1e-9)


@given(st.floats(0.0, 0.99), st.floats(0.001, 1.5))
def test_optimal_gamma_is_optimal(alpha: float, c: float) -> None:
    gamma = theory.optimal_gamma(alpha, c)
    best = theory.speedup(alpha, gamma, c)
    assert best >= 1.0
    for other in (gamma - 2, gamma - 1, gamma + 1, gamma + 2, gamma + 10):
        if other >= 0:
            assert theory.speedup(alpha, other, c) <= best * (1 + 1e-12)


@given(st.floats(0.0, 0.99), st.floats(0.001, 1.0), st.floats(0.0, 0.5), st.floats(0.0, 0.2))
def test_marginal_gamma_is_optimal(alpha: float, c: float, overhead: float, slope: float) -> None:
    def verify(tokens: int) -> float:
        return 1.0 + slope * (tokens - 1)

    gamma, speed = theory.marginal_gamma([alpha], c, verify, overhead, 20)
    speeds = [theory.expected_tokens(alpha, g) / (g * c + verify(g + 1) + overhead) for g in range(1, 21)]
    assert speed == pytest.approx(max(1.0, *speeds))
    assert (gamma == 0) == (speed == 1.0)


def rotated(row: list[float]) -> np.ndarray:
    """A table whose rows are one row, moved on by a token each time: alpha is the same after every token."""
    return np.stack([np.roll(row, shift) for shift in range(len(row))]).astype(np.float32)


TARGET = [0.4, 0.2, 0.15, 0.1, 0.05, 0.05, 0.03, 0.02]
DRAFT = [0.2, 0.3, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05]


@pytest.mark.few(1)
@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_measured_tau_is_the_expected_tokens(gamma: int) -> None:
    """One false alarm in a million seeds (five standard errors)."""
    target, draft = rotated(TARGET), rotated(DRAFT)
    alpha = theory.acceptance(TARGET, DRAFT)
    assert alpha < 0.8
    rounds: list[int] = []
    generate(target, drafters.chain(draft, gamma), VERIFIERS["ratio"], 12_000, RequestNoise(3, gamma), rounds)
    tau, error = np.mean(rounds), np.std(rounds) / np.sqrt(len(rounds))
    print(f"gamma {gamma}: tau {tau:.4f}, expected {theory.expected_tokens(alpha, gamma):.4f}")
    assert abs(tau - theory.expected_tokens(alpha, gamma)) < 5 * error


@pytest.mark.thorough
def test_acceptance_of_a_point_mass_is_its_probability() -> None:
    """Why a draw beats a guess: sum min(p, q) against p(guess). Both rules accept a guess alike."""
    target = rotated(TARGET)
    guess = drafters.point_mass_tree(rotated(DRAFT), 1, 1)
    for rule in ("ratio", "coupled"):
        rounds: list[int] = []
        generate(target, guess, VERIFIERS[rule], 10_000, RequestNoise(4), rounds)
        # The draft's best is the second token of its row, to which the target gives 0.2.
        assert abs(np.mean(rounds) - 1.2) < 5 * np.std(rounds) / np.sqrt(len(rounds))
