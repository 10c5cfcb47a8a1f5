"""What the embedded retriever's heads are worth: its answers from an eighth of a text, beside those from all of it."""

from __future__ import annotations

import numpy as np
import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.policies.infllm import InfLLM
from sakiyomi.train.long_tasks import TASKS

LENGTH, BUDGET, COUNT = 1024, 128, 6


def right(cache: str, task: str, query_first: bool = False) -> float:
    """Share of right answers."""
    budget = None if cache == "full" else BUDGET
    llm = LLM("retriever", "none", cache=cache, kv_budget=budget, chunk_size=128, compile=False, dtype="float32")
    made = TASKS[task]
    asked = [made.make(np.random.default_rng(100 + i), LENGTH, llm.tokenizer) for i in range(COUNT)]
    done = llm.generate(
        [one.prompt(query_first=query_first) for one in asked], SamplingParams(max_new_tokens=made.answer_tokens)
    )
    return sum(made.score(out.text, one) for out, one in zip(done, asked, strict=True)) / COUNT


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["passkey", "kv", "multikey"])
def test_heads_keep_what_is_asked_for(task: str) -> None:
    """By far more than what was last, and nearly all of what the whole text answers."""
    full, locret = right("full", task), right("locret:retriever-retaining", task)
    assert full > 0.9
    assert locret >= full - 1 / COUNT
    assert right("streaming", task) <= locret - 0.5


@pytest.mark.thorough
def test_heads_that_know_the_question_keep_its_answer_in_a_text_of_answers_alone() -> None:
    """Nothing but the question tells the pairs of such a text apart: it stands in front."""
    full, locret = (right(cache, "kv-dense", True) for cache in ("full", "locret:retriever-retaining-query"))
    assert full > 0.9
    assert locret >= full - 1 / COUNT
    assert right("keydiff", "kv-dense", True) <= locret - 0.5


@pytest.mark.thorough
def test_a_question_chooses_what_it_is_answered_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """InfLLM reads a prompt's end again, on blocks that it chose itself; those of the chunk before say little."""
    assert right("infllm", "passkey") > 0.8
    monkeypatch.setattr(InfLLM, "reread_tokens", 0)
    assert right("infllm", "passkey") < 0.5
