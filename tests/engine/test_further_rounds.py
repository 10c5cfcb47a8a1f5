"""Rounds that follow one another in a call of the kernels: where nobody waits, and as long as no text ends."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest

from random_models import Numbers, random_llama
from sakiyomi import LLM, SamplingParams
from sakiyomi.core.outputs import Generation, Step
from sakiyomi.drafters.draft_length import AutoSize, Costs, FixedSize, Heuristic, Phase
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine import engine as loop
from sakiyomi.engine.pace import Pace
from sakiyomi.engine.speculation import SpeculationController
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.kernel_rounds import MOST_ROUNDS, Further, KernelRounds

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")

VOCAB = 300
PROMPTS = [[5, 6, 7], list(range(20, 29)), [9] * 5]
PATIENT = 1000.0
DRAFTS = [None, "model", "suffix", "recycle+suffix"]


def made(draft: str | None, **options: Any) -> LLM:
    target = random_llama(64, 2, 4, 128, VOCAB, None)
    drafter: Any = ModelDrafter(build_runner(target, max_slots=3), VOCAB) if draft == "model" else draft
    llm = LLM((target, Numbers()), draft=drafter, dtype="float32", max_batch=3, **options)
    llm.generate(PROMPTS, params(max_new_tokens=12))
    llm.wait()
    return llm


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 40, "ignore_eos": True, "gamma": 4} | values))


def told(out: Generation) -> dict[str, Any]:
    """All that is told of a text, but seconds."""
    found = out.to_dict()
    stats = {name: value for name, value in found["stats"].items() if "second" not in name}
    return found | {"stats": stats}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds of each call of the kernels."""
    run, found = KernelRounds.run, list[int]()

    def counted(rounds: KernelRounds, *asked: Any, **how: Any) -> Any:
        spans = run(rounds, *asked, **how)
        found.append(len(spans))
        return spans

    monkeypatch.setattr(KernelRounds, "run", counted)
    return found


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_are_those_of_calls_of_one(
    draft: str | None, temperature: float, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, found = made(draft), []
    for patience in (0.0, PATIENT):
        monkeypatch.setattr(loop, "BRIEF", patience)
        if llm.engine.drafter is not None:
            llm.engine.drafter.forget()
        calls.clear()
        done = [llm.generate(prompts, params(temperature=temperature, seed=3)) for prompts in (PROMPTS, PROMPTS[:1])]
        rounds = [out.stats.rounds for out in done[1]]
        assert (sum(calls) >= sum(rounds) > 0) and (max(calls) == 1) == (patience == 0.0)
        found.append([told(out) for each in done for out in each])
    assert found[0] == found[1]


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_text_ends_where_it_ends(draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a stop, at its length, at the largest context; others of the same rounds go on."""
    llm = made(draft, max_context=64)
    monkeypatch.setattr(loop, "BRIEF", 0.0)
    whole = llm.generate(PROMPTS, params(max_new_tokens=55))
    token = whole[0].token_ids[9]
    cases = [
        params(max_new_tokens=55, stop_token_ids=(token,)),
        *[params(max_new_tokens=length) for length in (1, 2, 7, 23)],
        params(max_new_tokens=200),
    ]
    for each in cases:
        monkeypatch.setattr(loop, "BRIEF", 0.0)
        expected = llm.generate(PROMPTS, each)
        monkeypatch.setattr(loop, "BRIEF", PATIENT)
        found = llm.generate(PROMPTS, each)
        assert [out.token_ids for out in found] == [out.token_ids for out in expected]
        assert [out.finish_reason for out in found] == [out.finish_reason for out in expected]


def test_who_waits_does_not_wait_for_them(calls: list[int]) -> None:
    """Neither a request in the queue nor a prompt that is being read; nor are there any where nobody asked for them."""
    llm = made(None)
    engine = llm.engine
    first = [engine.submit(prompt, params(), live=False) for prompt in PROMPTS]
    engine.step(PATIENT)
    calls.clear()
    assert len(engine.step()) == len(PROMPTS) and calls == [1]
    waiting = engine.submit(PROMPTS[0], params(), live=False)  # for one of three slots
    assert len(engine.step(PATIENT)) == len(PROMPTS) and calls == [1, 1]
    engine.remove(first[0].id)
    engine.step(PATIENT)  # its prompt is read
    assert calls == [1, 1, 1]
    steps = engine.step(PATIENT)
    assert calls == [1, 1, 1, MOST_ROUNDS]
    assert [step.request for step in steps] == [each.id for each in (*first[1:], waiting)] * MOST_ROUNDS
    assert all(len(step.token_ids) == 1 for step in steps)
    for request in (*first, waiting):
        engine.remove(request.id)


def test_they_end_when_their_time_is_over(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "BRIEF", 1e-9)
    made(None)
    assert set(calls) == {1}


@pytest.mark.parametrize(
    "options", [{"stop": ("12 13 14",)}, {"repetition_penalty": 1.1}, {"tree": "best-first", "nodes": 6}]
)
def test_what_is_found_out_in_between_is_waited_for(options: dict[str, Any], calls: list[int]) -> None:
    """Stops that are strings, options that Python follows, trees that learn."""
    llm = made("model")
    calls.clear()
    llm.generate(PROMPTS, params(**options))
    assert set(calls) == {1}


def test_a_stream_goes_on_round_by_round(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who leaves it leaves behind what they have seen."""
    monkeypatch.setattr(loop, "BRIEF", PATIENT)
    llm = made(None)
    calls.clear()
    with llm.conversation() as chat:
        for count, _ in enumerate(chat.stream(PROMPTS[1], params()), start=1):
            if count == 5:
                break
        assert chat.stats is not None and chat.stats.tokens == 5
    assert set(calls) == {1}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_is_read_up_to_its_own_context(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target, found = random_llama(64, 2, 4, 128, VOCAB, None), []
    for patience in (0.0, PATIENT):
        monkeypatch.setattr(loop, "BRIEF", patience)
        draft = build_runner(target, max_slots=3)
        draft.max_context = 32
        llm = LLM((target, Numbers()), draft=ModelDrafter(draft, VOCAB), dtype="float32", max_batch=3)
        for _ in range(2):
            done = llm.generate(PROMPTS, params(temperature=temperature, acceptance="ratio", seed=3))
            llm.wait()
        found.append([(out.token_ids, out.stats.drafted, out.stats.accepted) for out in done])
    assert found[0] == found[1]


@pytest.mark.parametrize("draft", ["model", "suffix", "recycle+suffix"])
def test_one_of_them_that_fails_is_run_again(draft: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the tables of positions, where Python runs a pass: with the same candidates."""
    monkeypatch.setattr("sakiyomi.model_executor.program.TABLE_ROWS", 32)
    found = []
    for patience in (0.0, PATIENT):
        monkeypatch.setattr(loop, "BRIEF", patience)
        llm = made(draft)
        calls.clear()
        done = llm.generate(PROMPTS, params(max_new_tokens=90, temperature=0.8, acceptance="ratio", seed=3))
        assert (max(calls) > 1) == (patience > 0)
        found.append([told(out) for out in done])
    assert found[0] == found[1]


@pytest.mark.parametrize("draft", ["model", "suffix", "recycle+suffix"])
def test_its_draft_is_dropped(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call may want none."""
    monkeypatch.setattr("sakiyomi.model_executor.program.TABLE_ROWS", 32)
    monkeypatch.setattr(loop, "BRIEF", PATIENT)
    llm = made(draft)
    depths, run, read = SpeculationController.depths, KernelRounds.run, KernelRounds.committed
    fewer, drafted = [False], list[int]()

    def some(self: SpeculationController, requests: Any) -> list[int]:
        return [0] * len(requests) if fewer[0] else depths(self, requests)

    def counted(rounds: KernelRounds, *asked: Any, further: Further, **how: Any) -> Any:
        spans = run(rounds, *asked, further=further, **how)
        fewer.append(0 < len(spans) <= further.rounds)
        return spans

    def committed(rounds: KernelRounds, *counts: int) -> Any:
        found = read(rounds, *counts)
        if fewer.pop(0):
            drafted.append(max(each.nodes for each in found))
        return found

    monkeypatch.setattr(SpeculationController, "depths", some)
    monkeypatch.setattr(KernelRounds, "run", counted)
    monkeypatch.setattr(KernelRounds, "committed", committed)
    llm.generate(PROMPTS, params(max_new_tokens=90))
    assert drafted and not any(drafted)


@pytest.mark.parametrize("draft", ["suffix", "recycle+suffix"])
def test_what_nobody_got_is_forgotten(draft: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind a call: texts of a drafter have read what the kernels committed, and no request has it."""
    llm = made(draft)
    expected = [out.token_ids for out in llm.generate(PROMPTS, params())]
    requests = [llm.engine.submit(prompt, params(), live=False) for prompt in PROMPTS]
    for _ in range(4):
        llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(KernelRounds, "committed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step(PATIENT)
    assert calls[-1] > 2
    calls.clear()
    while not all(request.over for request in requests):
        llm.engine.step(PATIENT)
    assert [request.output for request in requests] == expected
    assert max(calls) > 1 and min(calls) > 0


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("draft", ["model", "suffix"])
def test_a_long_prompt_is_read_before_they_begin(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without a draft, behind one that was not ready, would be those of calls of one with drafts."""
    monkeypatch.setattr("sakiyomi.drafters.native_texts.CHUNK", 200)
    monkeypatch.setattr("sakiyomi.drafters.model.CHUNK", 200, raising=False)
    llm, found = made(draft, max_context=2048), []
    prompt = [i % 7 + i % 5 for i in range(1500)]
    for patience in (0.0, PATIENT):
        monkeypatch.setattr(loop, "BRIEF", patience)
        (out,) = llm.generate([prompt], params(max_new_tokens=60))
        found.append((out.token_ids, out.stats.rounds, out.stats.drafted, out.stats.accepted))
    assert found[0] == found[1]


def test_a_stream_beside_them_gets_its_steps_one_by_one(calls: list[int]) -> None:
    llm = made(None)
    heard: deque[Step] = deque()
    live = llm.engine.submit(PROMPTS[0], params(), outbox=heard)
    llm.engine.step()
    calls.clear()
    llm.generate(PROMPTS[1:], params(max_new_tokens=10))
    assert set(calls) == {1} and len(heard) == 1 + len(calls)
    llm.engine.remove(live.id)


def test_one_that_is_not_drafted_and_one_that_is(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, found = made("model"), []
    for patience in (0.0, PATIENT):
        monkeypatch.setattr(loop, "BRIEF", patience)
        llm.engine.drafter.forget()  # type: ignore[union-attr]
        calls.clear()
        each = [{"drafted": False}, {}, {"key": (1,)}]
        requests = [
            llm.engine.submit(prompt, params(temperature=0.8, seed=3, gamma=gamma), live=False, **options)
            for prompt, options, gamma in zip(PROMPTS, each, (4, 4, 2), strict=True)
        ]
        done = llm.engine.complete(requests)
        found.append([(out.token_ids, out.stats.drafted, out.stats.accepted) for out in done])
        assert (max(calls) > 1) == (patience > 0)
    assert found[0] == found[1] and found[0][0][1] == 0 < found[0][1][1]


def test_each_has_its_share_of_what_is_done_outside() -> None:
    """One that is alone in its call is not slower than others; what passes cost that are made is the first round's."""
    llm = made(None)
    committed = llm.engine._native._committed
    committed._outside.clear()
    committed._made = sum(model.clock.made for model in committed._rounds.models)
    assert committed._shares(0.8, 1, 8) == [pytest.approx(0.1)] * 8
    assert committed._shares(0.9, 1, 1) == [pytest.approx(0.11)]
    assert committed._shares(0.9, 2, 1) == [0.9]
    llm.target.clock.made += 1
    assert committed._shares(30.0, 1, 3) == [30.0, *[pytest.approx(0.11)] * 2]
    assert max(committed._shares(0.88, 1, 8)) < 0.12


def test_a_row_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without a number in the middle of a call: the rounds before it count, and the error is the same."""
    text, found = made(None).generate([PROMPTS[0]], params())[0].token_ids, []
    token = next(token for i, token in enumerate(text) if i > 3 and token not in text[:i] and token not in PROMPTS[0])
    for patience in (0.0, PATIENT):
        monkeypatch.setattr(loop, "BRIEF", patience)
        fresh = made(None)
        fresh.target.module.get_input_embeddings().weight.data[token] = float("nan")
        request = fresh.engine.submit(PROMPTS[0], params(), live=False)
        while not request.over:
            fresh.engine.step(patience)
        found.append((request.output, type(request.error), str(request.error)))
    assert found[0] == found[1]
    assert found[0][0] == text[: text.index(token) + 1]


def costs(depth: int = 4) -> Costs:
    return Costs(lambda rows: 1e-3, 1e-4, 1e-4, depth=depth)


@pytest.mark.parametrize("rest", [1, 3, 12])
def test_what_is_skipped_counts_as_asked(rest: int) -> None:
    asked = AutoSize()
    asked.phase, asked._left = Phase.RESTING, rest
    skipped = copy.deepcopy(asked)
    for policy in (asked, skipped):
        policy.next(costs)
    count = skipped.unchanged(100)
    assert count == rest - 1 == asked.unchanged(100)
    assert skipped.unchanged(1) == min(1, count)
    sizes = {asked.next(costs) for _ in range(count)}
    skipped.skip(count)
    assert len(sizes) <= 1 and asked._left == skipped._left == 0
    assert asked.next(costs) == skipped.next(costs)
    assert asked.phase is skipped.phase is Phase.PROBING


def test_sizes_that_change_every_round_are_asked_for() -> None:
    assert FixedSize(4, 4, chain=True).unchanged(7) == 7
    assert FixedSize(Heuristic(), 4, chain=True).unchanged(7) == 0
    trying = AutoSize()
    trying.next(costs)
    assert trying.phase is Phase.TRYING and trying.unchanged(7) == 0
    trying.phase = Phase.DRAFTING
    assert trying.unchanged(7) == 7


@pytest.mark.parametrize("requests", [1, 4])
def test_rounds_with_drafts_and_without_are_told_apart(requests: int) -> None:
    """So many rounds after the next one are as it is, whatever was measured before."""
    pace = Pace(requests)
    for seconds in (1.0, 1.0, 1.0):
        pace.add_plain(seconds)
    for number in range(600):
        ahead, count, now = copy.deepcopy(pace), pace.unchanged(1000), pace.undrafted
        for _ in range(count):
            (ahead.add_plain(1.0) if now else ahead.add_drafted(1.2, 1.25))
            if ahead._look != pace._look or (not now and ahead._left):
                break  # what was measured has changed what is wanted
            assert ahead.undrafted is now
        pace.add_plain(1.0) if now else pace.add_drafted(1.2 if number % 50 else 3.0, 1.25)
