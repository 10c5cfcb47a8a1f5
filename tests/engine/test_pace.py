"""What rounds bring: drafting is measured against plain rounds, and rests where it loses."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.engine import engine
from sakiyomi.engine.pace import (
    DOUBTS,
    FIRST_LOOKS,
    LOOK_EVERY,
    NEAR_EVERY,
    READINGS,
    REST,
    REST_LATEST,
    SETTLED,
    TRIAL,
    Pace,
)
from sakiyomi.engine.speculation import SpeculationController
from toys import tiny_llama, tiny_tokenizer


def run(pace: Pace, rounds: int, *, tokens: float, drafted: float, plain: float) -> str:
    """What so many rounds are: d with drafts, which take `drafted` seconds and bring `tokens`, p without."""
    seen = ""
    for _ in range(rounds):
        if pace.undrafted:
            pace.add_plain(plain)
            seen += "p"
        else:
            pace.add_drafted(tokens, drafted)
            seen += "d"
    return seen


def test_what_wins_is_compared_with_a_plain_round_now_and_then() -> None:
    first = "d" * Pace(8).settled + "p" * FIRST_LOOKS
    seen = run(Pace(8), 1000, tokens=3.0, drafted=1.5, plain=1.0)
    assert seen.startswith(first + "d" * LOOK_EVERY + "pd")
    assert seen.count("p") == FIRST_LOOKS + (1000 - len(first)) // (LOOK_EVERY + 1)
    seen = run(Pace(8), 1000, tokens=3.0, drafted=2.5, plain=1.0)  # where it brings little, a look costs less
    assert seen.startswith(first + "d" * NEAR_EVERY + "pd")


def test_plain_rounds_that_something_else_held_up_do_not_count() -> None:
    """A round that took four times as long made drafting look good until a hundred others had been measured."""
    pace = Pace(8)
    for _ in range(pace.settled):
        pace.add_drafted(3.0, 3.3)
    for seconds in (4.0, 1.0, 1.0):
        assert pace.undrafted
        pace.add_plain(seconds)
    pace.add_drafted(3.0, 6.0)
    assert pace.plain == 1.0 and pace.undrafted  # it rests
    assert run(Pace(8), 100, tokens=3.0, drafted=4.0, plain=1.0).count("d") < 10
    for _ in range(READINGS):  # and the text becomes longer
        pace.add_plain(2.0)
    assert pace.plain == 2.0


def test_what_loses_rests_ever_longer() -> None:
    seen = run(Pace(8), 4000, tokens=3.0, drafted=4.0, plain=1.0)
    rests = [len(part) for part in seen.split("d") if len(part) > 1]
    assert rests[1:5] == [REST, 2 * REST, 4 * REST, 8 * REST] and max(rests) <= REST_LATEST
    trials = [len(part) for part in seen.split("p") if part]
    assert trials[0] == Pace(8).settled and set(trials[2:-1]) == {TRIAL}
    assert seen.count("d") < 0.02 * len(seen)


def test_a_close_loss_is_looked_at_for_longer() -> None:
    """Three rounds say little: where drafts bring a tenth more, every other trial was a loss, and rests doubled."""
    seen = run(Pace(4), 200, tokens=3.0, drafted=3.3, plain=1.0)
    assert seen.startswith("d" * Pace(4).settled + "p" * FIRST_LOOKS + "d" * DOUBTS + "d" + "p")
    assert seen.count("d") < 40
    assert run(Pace(4), 8000, tokens=3.0, drafted=3.3, plain=1.0).count("d") < 8000 // 40
    pace = Pace(4)
    assert run(pace, pace.settled + FIRST_LOOKS + 1, tokens=3.0, drafted=3.3, plain=1.0).endswith("d")
    assert pace.rate == 0.0  # no request hears of it
    assert "ppp" not in run(pace, 100, tokens=3.0, drafted=1.0, plain=1.0)


def test_it_is_taken_up_again_when_it_wins() -> None:
    pace = Pace(8)
    assert run(pace, 200, tokens=3.0, drafted=4.0, plain=1.0).endswith("p")
    seen = run(pace, 1000, tokens=3.0, drafted=1.0, plain=1.0)
    assert seen[300:].count("d") > 0.98 * len(seen[300:])


def test_requests_behind_a_rest_do_not_hear_of_the_loss_before_it() -> None:
    """Else short ones, which rest longer than they last where others lost, would never draft again."""
    pace = Pace(8)
    run(pace, pace.settled + FIRST_LOOKS + 1, tokens=3.0, drafted=4.0, plain=1.0)
    assert pace.rate == pytest.approx(0.75)
    run(pace, REST, tokens=3.0, drafted=4.0, plain=1.0)
    assert pace.rate == 0.0 and not pace.undrafted
    assert run(pace, TRIAL, tokens=3.0, drafted=1.0, plain=1.0) == "d" * TRIAL
    assert pace.rate > 1.5


def test_one_request_alone_decides_by_itself() -> None:
    assert run(Pace(1), 300, tokens=1.0, drafted=4.0, plain=1.0).count("p") == FIRST_LOOKS + (300 - SETTLED - 3) // 25


def test_nothing_is_expected_before_enough_was_seen() -> None:
    pace = Pace(2)
    assert [Pace(count).settled for count in (1, 4, 32)] == [SETTLED, SETTLED // 2, 3]
    run(pace, pace.settled - 1, tokens=3.0, drafted=2.0, plain=1.0)
    assert pace.rate == 0.0
    run(pace, 1, tokens=3.0, drafted=2.0, plain=1.0)
    assert pace.rate == pytest.approx(1.5)


def test_short_requests_try_anew_after_a_bad_beginning() -> None:
    """A request that begins where drafts have lost rests longer than a short one lasts: somebody has to forget."""
    pace = Pace(1)
    run(pace, SETTLED, tokens=1.0, drafted=4.0, plain=1.0)
    waits, plain = [], 0
    while len(waits) < 4:
        assert pace.rate == pytest.approx(0.25)
        while pace.rate:
            pace.add_plain(1.0)
            plain += 1
        waits.append(plain)
        plain = 0
        run(pace, SETTLED, tokens=1.0, drafted=4.0, plain=1.0)
    assert waits == [REST, 2 * REST, 4 * REST, 8 * REST]
    run(pace, SETTLED, tokens=9.0, drafted=4.0, plain=1.0)  # it wins now: the next rest is short again
    for _ in range(REST):
        pace.add_plain(1.0)
    assert pace.rate == 0.0


def test_the_first_round_of_a_process_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures what a pass costs; a trial pass took as long, and committed nothing."""
    asked: list[bool] = []
    observe = SpeculationController.observe

    def spy(self: SpeculationController, *round_: Any) -> None:
        asked.append(round_[-1].drafted.asked)
        observe(self, *round_)

    monkeypatch.setattr(SpeculationController, "observe", spy)
    llm = LLM((tiny_llama(), tiny_tokenizer()), "suffix", dtype="float32", strict=True)
    params = SamplingParams(temperature=0.0, max_new_tokens=12, gamma="auto")
    llm.generate(["a b a b a b"], params)
    assert asked[:2] == [False, True]
    asked.clear()
    llm.generate(["a b a b a b"], params)
    assert asked[0]


@pytest.mark.parametrize("draft", ["suffix", "recycle+suffix+prompt-lookup"])
def test_some_of_many_requests_try_for_all(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter drafts as long as it is not known whether that pays; what it would be with all of them is reckoned."""
    drafting: dict[bool, list[int]] = {False: [], True: []}
    added: list[tuple[float, ...]] = []
    decide, observe, add = SpeculationController.depths, SpeculationController.observe, Pace.add_drafted
    clock: list[float] = []
    scored: list[tuple[int, int]] = []
    ticks = itertools.count(1)  # looks at the clock: where larger passes are dear, rightly nothing is tried
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-5 * next(ticks))
    monkeypatch.setattr(engine, "BRIEF", 0.0)  # what the kernels measure is no count

    def spy(self: SpeculationController, requests: Any) -> list[int]:
        depths = decide(self, requests)
        if len(requests) == 16:
            drafting[bool(self._pace(16).rate)].append(sum(map(bool, depths)))
        return depths

    def timed(self: SpeculationController, requests: Any, depths: Any, kept: Any, rows: int, round_: Any) -> None:
        clock[:] = [sum(kept), self._pace(len(kept)).plain, len(kept)]
        if len(kept) == 16 and not self._pace(16).rate:
            scored.append((rows, self.target.padded(18)))
        observe(self, requests, depths, kept, rows, round_)

    def noted(self: Pace, tokens: float, seconds: float) -> None:
        kept, plain, count = clock
        if count == 16 and not self.rate:
            added.append((tokens, 1 + kept / 4, seconds, plain))
        add(self, tokens, seconds)

    monkeypatch.setattr(SpeculationController, "depths", spy)
    monkeypatch.setattr(SpeculationController, "observe", timed)
    monkeypatch.setattr(Pace, "add_drafted", noted)
    llm = LLM((tiny_llama(), tiny_tokenizer()), draft, dtype="float32", strict=True, max_batch=16)
    params = SamplingParams(temperature=0.0, max_new_tokens=40, gamma="auto", ignore_eos=True)
    outputs = llm.generate(["a b a b a b"] * 16, params)
    assert len({tuple(out.token_ids) for out in outputs}) == 1
    assert any(drafting[False]) and max(drafting[False]) <= 4
    assert max(rows for rows, _ in scored) > 16
    assert all(rows <= most for rows, most in scored), "of a pass of the next size"
    assert added and all(tokens == mean and seconds >= plain > 0 for tokens, mean, seconds, plain in added)
    monkeypatch.setattr(Pace, "rate", 1e9)  # it pays
    monkeypatch.setattr(Pace, "undrafted", False)
    monkeypatch.setattr(SpeculationController, "_worth_reading", lambda *_: True)
    llm.generate(["a b a b a b"] * 16, params)
    assert max(drafting[True]) > 4
