"""What many requests share, so that none of them is held up: draft passes over prompts, costs, memory figures."""

from __future__ import annotations

from typing import Any

import pytest

import sakiyomi.model_executor.build
from architectures import VOCAB, greedy, model_of, prompt
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
    assert [one.token_ids for one in found] == [greedy(model_of("llama"), tokens, NEW) for tokens in prompts]


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
