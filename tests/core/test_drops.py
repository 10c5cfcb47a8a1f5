"""Acceptance that falls: what is seen, and what is chance."""

from __future__ import annotations

import random

import pytest

from sakiyomi.core.drops import FELL, Tau, TauWatch, change, fallen


def test_what_is_lower_by_more_than_chance() -> None:
    then = Tau(4.0, 0.02)
    assert fallen(Tau(3.4, 0.02), then)
    assert not fallen(Tau(3.4, 0.06), then), "few texts"
    assert not fallen(Tau(4.0 * (1 - FELL) + 0.01, 0.0), then), "a little"
    assert not fallen(Tau(5.0), then)
    assert change(Tau(3.0), then) == pytest.approx(-0.25)
    assert not fallen(Tau(3.0), Tau(0.0)) and Tau.of([]) == Tau(0.0)


def test_tau_of_texts() -> None:
    assert Tau.of([(10, 5), (20, 5)]).value == 3.0
    assert Tau.of([(10, 5), (20, 5)]).error > 0.2 > Tau.of([(10, 5), (10, 5)]).error


def test_the_last_rounds_are_watched() -> None:
    """Rounds as good as then for long, then worse, then better again."""
    rng = random.Random(1)
    watch = TauWatch(Tau(3.0, 0.02), window=400)
    turns = []
    for place, mean in enumerate([3] * 2000 + [2] * 1200 + [3] * 1200):
        if watch.add(rng.choice([mean - 1, mean, mean + 1])):
            turns.append((place, watch.fell))
    assert [fell for _, fell in turns] == [True, False]
    assert 2000 < turns[0][0] < 2600 and 3200 < turns[1][0] < 3800
    assert watch.recent.value == pytest.approx(3.0, abs=0.2)
