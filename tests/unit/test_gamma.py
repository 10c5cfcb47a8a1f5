"""Draft lengths: what each policy asks for after what it has seen."""

from __future__ import annotations

import pytest

from sakiyomi.gamma import MOST, PROBE, PROBE_EVERY, AutoGamma, ConstantGamma, Costs, HeuristicGamma, make_policy


def costs(draft: float = 0.1, slope: float = 0.02, overhead: float = 0.0) -> Costs:
    """A target step costs 1, every further row ``slope``."""
    return Costs(lambda rows: 1.0 + slope * (rows - 1), draft, overhead)


def after(accepted: float, rounds: int = 60, gamma: int = 4) -> AutoGamma:
    """Having seen drafts of which every token is accepted, or none, in turn, so that the mean is right."""
    policy, level = AutoGamma(), 0.0
    for _ in range(rounds):
        kept = 0
        while kept < gamma:
            level += accepted
            if level < 1.0:
                break
            level -= 1.0
            kept += 1
        policy.observe(gamma, kept)
    return policy


def test_names() -> None:
    assert isinstance(make_policy(3), ConstantGamma)
    assert isinstance(make_policy("heuristic"), HeuristicGamma)
    assert isinstance(make_policy("auto"), AutoGamma)


def test_heuristic_starts_at_five_and_moves_by_two_up_one_down() -> None:
    policy = HeuristicGamma()
    asked = []
    for accepted in (5, 7, 2, 0, None, 7):
        asked.append(policy.next(costs))
        policy.observe(0 if accepted is None else asked[-1], accepted or 0)
    assert asked == [5, 7, 9, 8, 7, 7]
    assert policy.gamma == 9
    for _ in range(20):
        policy.observe(policy.gamma, 0)
    assert policy.gamma == 1


def test_acceptance_is_estimated_by_place() -> None:
    """The first token is always kept, the second never: the third is never reached and taken to be as the second."""
    policy = AutoGamma()
    for _ in range(200):
        policy.observe(4, 1)
    first, second = policy.alphas()
    assert first > 0.95 and second < 0.15


def test_more_is_drafted_where_more_is_accepted() -> None:
    asked = [after(rate).next(costs) for rate in (0.3, 0.6, 0.9)]
    assert asked == sorted(asked)
    assert asked[0] < asked[2] <= MOST


def test_less_is_drafted_where_drafting_costs_more() -> None:
    cheap, dear = (after(0.8).next(lambda c=c: costs(draft=c)) for c in (0.02, 0.4))
    assert cheap > dear


def test_nothing_is_drafted_where_it_does_not_pay_but_now_and_then() -> None:
    policy = after(0.2)
    asked = [policy.next(lambda: costs(draft=0.5)) for _ in range(2 * PROBE_EVERY)]
    assert asked.count(0) == len(asked) - 2
    assert [i for i, gamma in enumerate(asked) if gamma == PROBE] == [PROBE_EVERY - 1, 2 * PROBE_EVERY - 1]


def test_it_begins_again_when_the_text_becomes_easier() -> None:
    policy = after(0.1)
    assert policy.next(lambda: costs(draft=0.3)) == 0
    for _ in range(60):
        policy.observe(PROBE, PROBE)
    assert policy.next(lambda: costs(draft=0.3)) > 0


def test_a_pass_that_grows_with_its_rows_keeps_drafts_short() -> None:
    flat, steep = (after(0.9).next(lambda s=s: costs(slope=s)) for s in (0.0, 0.5))
    assert flat > steep


def test_the_measured_overhead_counts() -> None:
    assert after(0.5).next(lambda: costs(overhead=5.0)) == 0


@pytest.mark.parametrize("batch", [1, 4])
def test_rows_of_all_requests_are_paid_for(batch: int) -> None:
    asked: list[int] = []

    def score(rows: int) -> float:
        asked.append(rows)
        return 1.0 + 0.1 * rows

    AutoGamma().next(lambda: Costs(score, 0.1, 0.0, batch))
    assert all(rows % batch == 0 for rows in asked)
    assert max(asked) == batch * (MOST + 1)
