"""What passes cost: trials of a few row counts, guesses of the others, and what is told of readings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sakiyomi.model_executor.pass_clock import TRIAL_SHARE, TRIALS, PassClock
from sakiyomi.model_executor.session import ALL_SIZES, SIZES


def trier(clock: PassClock, costs: Callable[[int], float], tried: list[int]) -> Callable[[int], None]:
    """Runs an empty pass that costs what it is said to."""

    def trial(size: int) -> None:
        tried.append(size)
        clock.add(size, True, costs(size))

    return trial


@pytest.mark.parametrize("sizes", [SIZES, ALL_SIZES])
def test_only_few_rows_are_tried_before_the_first_text(sizes: tuple[int, ...]) -> None:
    clock, tried = PassClock(lambda size: True, offloaded=False), list[int]()
    trial = trier(clock, lambda size: 0.0010 + 0.0002 * size, tried)
    found = {size: clock.seconds(size, sizes, trial) for size in sizes}
    assert tried == [1] * TRIALS + [4] * TRIALS + [8]  # that one is slow enough that one says it
    assert found[1] == pytest.approx(0.0012) and found[4] == pytest.approx(0.0018)
    assert found[16] == pytest.approx(0.0042)  # along the line, which is steeper than a root here
    assert sorted(found.values()) == list(found.values())


@pytest.mark.parametrize("sizes", [SIZES, ALL_SIZES])
def test_a_slow_model_tries_one_row_and_further_ones_count_as_free_until_they_are_measured(
    sizes: tuple[int, ...],
) -> None:
    """Three trials take as long as three plain rounds: a twentieth of a short text."""
    clock, tried = PassClock(lambda size: True, offloaded=False), list[int]()
    trial = trier(clock, lambda size: 0.010, tried)
    found = [clock.seconds(size, sizes, trial) for size in (1, 4, 8)]
    assert found == pytest.approx([0.010] * 3)
    assert clock.seconds(32, sizes, trial) == pytest.approx(0.020)
    assert tried == [1]
    clock.add(4, True, 0.016)
    assert clock.seconds(4, sizes, trial) == clock.seconds(8, sizes, trial) == pytest.approx(0.016)
    assert tried == [1]


def test_what_costs_nothing_more_is_not_believed_of_any_number() -> None:
    clock, tried = PassClock(lambda size: True, offloaded=False), list[int]()
    trial = trier(clock, lambda size: 0.0010, tried)
    assert clock.seconds(32, SIZES, trial) == pytest.approx(0.0020)  # half way, by factors, to .0040
    assert set(tried) == {1, 4, 8}


def test_a_guess_lies_between_its_neighbours() -> None:
    clock, tried = PassClock(lambda size: True, offloaded=False), list[int]()
    trial = trier(clock, lambda size: 0.0010, tried)
    clock.add(8, True, 0.0020)
    assert clock.seconds(6, ALL_SIZES, trial) == pytest.approx(0.0015)
    assert set(tried) == {1, 4}


def test_others_are_tried_when_that_is_cheap() -> None:
    clock, tried = PassClock(lambda size: True, offloaded=False), list[int]()
    trial = trier(clock, lambda size: 0.010, tried)
    clock.seconds(16, SIZES, trial)
    assert 16 not in tried
    for _ in range(round(2 * 0.015 / TRIAL_SHARE / 0.010)):  # two passes of .014 s are .02 of 1.4 s
        clock.add(1, True, 0.010)
    assert clock.seconds(16, SIZES, trial) == pytest.approx(0.010)
    assert tried.count(16) == 1
    clock.seconds(32, SIZES, trial)
    assert 32 not in tried, "the share is of all trials together"


def test_of_the_first_two_readings_the_lower_one_counts() -> None:
    clock = PassClock(lambda size: True, offloaded=False)
    clock.add(4, True, 0.050)
    assert clock.known(4) == 0.050
    clock.add(4, True, 0.030)
    assert clock.known(4) == 0.030
    clock.add(4, True, 0.040)
    assert clock.known(4) == pytest.approx(0.031)
    clock.add(8, True, 0.9, fresh=True)  # it was recorded on the way
    assert clock.known(8) is None
    clock.add(1, False, 0.9)  # an eager one is a warm-up
    assert clock.known(1) is None


def test_rows_that_seem_too_dear_are_tried_again() -> None:
    clock, tried = PassClock(lambda size: True, offloaded=False), list[int]()
    costs = iter([0.002] * TRIALS + [0.010, 0.003])
    trial = trier(clock, lambda size: next(costs), tried)
    assert clock.seconds(1, SIZES, trial) == 0.002
    assert clock.seconds(4, SIZES, trial) == 0.003
    assert tried == [1] * TRIALS + [4, 4]


def test_small_changes_are_no_news() -> None:
    clock = PassClock(lambda size: True, offloaded=False)
    for seconds in [0.010] * 8:  # more have been made than come now
        clock.add(4, True, seconds)
    version = clock.version
    clock.add(4, True, 0.0101)
    assert clock.version == version and clock.known(4) == 0.010
    for _ in range(20):
        clock.add(4, True, 0.011)
    assert clock.version > version and clock.known(4) == pytest.approx(0.011, rel=0.03)
