"""What many requests share, so that none of them is held up: draft passes over prompts, costs, memory figures."""

from __future__ import annotations

from typing import Any

import pytest

import sakiyomi.model_executor.build
from architectures import VOCAB, model_of, prompt, references
from sakiyomi import LLM, MemoryLimitError, SamplingParams
from sakiyomi.drafters.draft_length import MOST_NODES
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.build import build_runner
from toys import character_tokenizer, tiny_llama

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
NEW = 12


def llm_with(draft: Any = "none", **options: Any) -> LLM:
    return LLM((model_of("llama"), TOKENIZER), draft, compile=False, **options)


def test_new_prompts_share_the_drafts_passes() -> None:
    draft = build_runner(tiny_llama(vocab=VOCAB, layers=1, seed=1), compile=False)
    llm = llm_with(ModelDrafter(draft, VOCAB))
    prompts = [prompt(9 + i, i) for i in range(4)]
    seen: list[int] = []
    draft.watchers.append(lambda plan, _: seen.append(sum(part.prompt for part in plan.parts)))
    found = llm.generate(prompts, SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3))
    assert [count for count in seen if count] == [4]
    assert [one.token_ids for one in found] == references("llama", prompts, NEW)


def test_prompts_beyond_a_chunk_take_more_than_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.drafters.model.CHUNK", 20)
    draft = build_runner(tiny_llama(vocab=VOCAB, layers=1, seed=1), compile=False)
    llm = llm_with(ModelDrafter(draft, VOCAB))
    seen: list[tuple[int, int]] = []

    def watch(plan: BatchPlan, _: float) -> None:
        if plan.prompts:
            seen.append((len(plan.parts), plan.rows))

    draft.watchers.append(watch)
    prompts = [prompt(13, i) for i in range(3)]
    llm.generate(prompts, SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3))
    assert seen == [(1, 13), (1, 13), (1, 13)]  # two of them would be 26 rows


def test_many_requests_read_no_further_ahead_than_the_largest_graph() -> None:
    llm = llm_with(max_batch=32)
    drafting, largest = llm.engine._speculation, llm.target.sizes[-1]
    rows: list[int] = []
    for batch in (1, 8, 32, 200):
        costs = drafting._costs(batch)
        rows.append(batch * (costs.nodes + 1))
        assert 1 <= costs.depth <= costs.nodes
    assert drafting._costs(1).nodes == MOST_NODES
    assert max(rows[:3]) <= largest < rows[3]  # beyond it there is one node: others would be tried out for nothing


def test_one_request_alone_does_not_inherit_the_speed_of_many() -> None:
    drafting = llm_with(max_batch=32).engine._speculation
    for _ in range(50):
        drafting._pace(32).add_drafted(1.0, 1.0)
    assert drafting._costs(32).rate == pytest.approx(1.0)
    assert drafting._costs(1).rate == 0.0


def test_memory_is_asked_about_once_for_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    left = [1 << 40]

    def available(device: str = "cpu") -> int:
        asked.append(device)
        return left[0]

    monkeypatch.setattr(sakiyomi.model_executor.build, "available_bytes", available)
    llm = llm_with(max_batch=2)
    params = SamplingParams(max_new_tokens=NEW)
    asked.clear()
    llm.engine.submit(prompt(5, 0), params)
    llm.engine.submit(prompt(5, 1), params)
    once = len(asked)
    for i in range(20):
        llm.engine.submit(prompt(5, i), params)
    assert once and len(asked) == once
    left[0] = 0
    with pytest.raises(MemoryLimitError):  # a longer one is another question
        llm.engine.submit(prompt(5, 0), SamplingParams(max_new_tokens=400))


def test_a_short_answer_is_not_worth_the_draft_s_reading_of_the_prompt() -> None:
    """What drafts save in the tokens that are left is weighed against what reading takes, as both were measured."""
    draft = build_runner(tiny_llama(vocab=VOCAB, layers=1, seed=1), compile=False)
    llm = llm_with(ModelDrafter(draft, VOCAB))

    drafting = llm.engine._speculation

    def drafted(**more: Any) -> int:
        (out,) = llm.generate([prompt(60)], SamplingParams(max_new_tokens=NEW, ignore_eos=True, **more))
        return out.stats.drafted

    def drafted_where_a_token_takes(reading: float, **more: Any) -> int:
        """Where a plain round takes a second, and one with drafts brings two tokens in that time."""
        drafting._paces.clear()
        pace, drafting._reading = drafting._pace(1), reading
        for _ in range(pace.settled):
            pace.add_drafted(2.0, 1.0)
            pace.add_plain(1.0)
        return drafted(**more)

    assert drafted() and drafting._reading > 0
    assert not drafted_where_a_token_takes(0.1), "six seconds, where eleven tokens are half saved"
    assert drafted_where_a_token_takes(0.1, gamma=3), "what a client asks for is done"
    assert drafted_where_a_token_takes(0.05)
