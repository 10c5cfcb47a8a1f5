"""The chi-square test of the audit: exact far into the tails, and without scipy, which only the tests install."""

from __future__ import annotations

import subprocess

import pytest
from scipy import stats

from sakiyomi.evaluation.audit import chi_square
from warm import warm

WITHOUT_SCIPY = """
import sys

sys.modules["scipy"] = None  # importing it now fails
import torch

from sakiyomi.evaluation.audit.chi_square import Frequencies, chance_to_see, rank, shift_to_see

probs = torch.tensor([0.6, 0.3, 0.1]).repeat(3000, 1)
counted = Frequencies(1, 3)
tokens = probs.multinomial(1, generator=torch.Generator().manual_seed(0))[:, 0].tolist()
counted.add(rank(probs, tokens, (1, 2)), [0] * 3000)
fit = counted.fit(1e-6)
assert fit.ok and 0 < fit.p < 1 and 0 < fit.power < 1, fit
assert abs(chance_to_see(shift_to_see(0.9, 2, 1e-6), 2, 1e-6) - 0.9) < 1e-9
"""


def test_a_plain_install_tests_sampled_text() -> None:
    done = subprocess.run([*warm(), "-c", WITHOUT_SCIPY], capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("freedom", [1, 2, 3, 12, 16, 24, 60, 400])
@pytest.mark.parametrize("level", [0.5, 1e-3, 1e-8, 1e-12, 1e-30])
def test_the_tail_agrees_with_scipy(freedom: int, level: float) -> None:
    bound = float(stats.chi2.isf(level, freedom))
    assert chi_square._tail(bound, freedom) == pytest.approx(float(stats.chi2.sf(bound, freedom)), rel=1e-8)


@pytest.mark.parametrize("freedom", [1, 2, 12, 24, 60])
@pytest.mark.parametrize("shift", [0.01, 1.0, 30.0, 200.0, 3000.0])
@pytest.mark.parametrize("level", [0.01, 1e-8])
def test_the_power_agrees_with_scipy(freedom: int, shift: float, level: float) -> None:
    expected = float(stats.ncx2.sf(stats.chi2.isf(level, freedom), freedom, shift))
    assert chi_square.chance_to_see(shift, freedom, level) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("power", [0.5, 0.999])
def test_the_shift_is_the_one_that_is_seen(power: float) -> None:
    shift = chi_square.shift_to_see(power, 12, 1e-8)
    assert float(stats.ncx2.sf(stats.chi2.isf(1e-8, 12), 12, shift)) == pytest.approx(power, rel=1e-7)
