from __future__ import annotations

import json

import pytest

from sakiyomi.core.outputs import Generation, RoundTrace, Stats, Step, TokenTrace


def some_stats() -> Stats:
    return Stats(
        tokens=11,
        rounds=4,
        committed=10,
        drafted=12,
        accepted=6,
        rejected=3,
        hit_rounds=3,
        seconds=2.0,
        prefill_seconds=0.5,
        draft_seconds=0.25,
        score_seconds=1.0,
    )


def test_derived_figures() -> None:
    stats = some_stats()
    assert stats.tau == 2.5
    assert stats.acceptance_rate == 0.5
    assert stats.hit_rate == 0.75
    assert stats.alpha == pytest.approx(6 / 9)
    assert stats.overhead_seconds == 0.25
    assert stats.tokens_per_second == 5.5


def test_the_four_clocks_sum_to_the_wall_clock() -> None:
    stats = some_stats()
    parts = stats.prefill_seconds + stats.draft_seconds + stats.score_seconds + stats.overhead_seconds
    assert parts == pytest.approx(stats.seconds)


def test_nothing_divides_by_zero() -> None:
    stats = Stats()
    for name in ("tau", "acceptance_rate", "hit_rate", "alpha", "overhead_seconds", "tokens_per_second"):
        assert getattr(stats, name) == 0.0


def test_total_adds_up() -> None:
    total = Stats.total([some_stats(), some_stats()])
    assert total.tokens == 22
    assert total.seconds == 4.0
    assert total.tau == 2.5
    assert Stats.total([]) == Stats()


def test_everything_becomes_json() -> None:
    trace = TokenTrace(7, "model:draft", "accepted", 1, 0.5, 0.25, top_logprobs=((7, -0.7), (8, -1.0)))
    round_trace = RoundTrace(1, (7, 9), (-1, 0), (0.5, 0.1), (0.25, None), (0,), 9, 4, "recovered")
    generation = Generation("a", [7], 3, "length", [trace], some_stats(), [round_trace])
    values = json.loads(json.dumps(generation.to_dict()))
    assert values["trace"][0]["top_logprobs"] == [[7, -0.7], [8, -1.0]]
    assert values["rounds_trace"][0]["draft_probs"] == [0.25, None]
    assert values["stats"]["tau"] == 2.5
    assert values["stats"]["overhead_seconds"] == 0.25
    assert "rounds_trace" not in Generation("a", [7], 3, "stop").to_dict()
    assert "top_logprobs" not in TokenTrace(1).to_dict()

    step = Step("a", (7,), (trace,), "stop", 5, some_stats())
    values = json.loads(json.dumps(step.to_dict()))
    assert values["request"] == 5
    assert values["stats"]["rounds"] == 4
    assert "stats" not in Step("a").to_dict()
