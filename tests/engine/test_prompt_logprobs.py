"""How likely a prompt's tokens are: the model's own numbers, however the prompt is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sakiyomi import LLM, InputError, MemoryLimitError, SamplingParams
from server_toys import toy_llm
from toys import tiny_llama

PROMPTS = [[5, 9, 17, 3, 250, 7, 7, 81, 40, 2, 66, 13], [5, 9, 17, 3, 250, 7, 8], [44]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return toy_llm(chunk_size=5)


def by_hand(tokens: list[int]) -> torch.Tensor:
    """(length - 1, V): log probabilities of what follows each token but the last."""
    with torch.no_grad():
        return tiny_llama(max_position_embeddings=4096)(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize("most", [0, 3])
def test_they_are_the_models_own(llm: LLM, most: int) -> None:
    """In chunks, beside each other, one prompt being the beginning of another."""
    found = llm.generate(PROMPTS, SamplingParams(max_new_tokens=5, prompt_logprobs=most))
    for prompt, out in zip(PROMPTS, found, strict=True):
        wanted = by_hand(prompt)
        assert [token.token_id for token in out.prompt_logprobs] == prompt
        first, *others = out.prompt_logprobs
        assert (first.logprob, first.rank, first.top_logprobs) == (None, None, ())
        for token, row in zip(others, wanted, strict=True):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
            assert token.rank == 1 + int((row > row[token.token_id]).sum())
            values, best = row.topk(most)
            assert [i for i, _ in token.top_logprobs] == best.tolist()
            assert [value for _, value in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)


def test_the_text_does_not_depend_on_them(llm: LLM) -> None:
    plain, scored = (
        llm.generate(PROMPTS, SamplingParams(max_new_tokens=9, temperature=1, seed=3, prompt_logprobs=most))
        for most in (None, 2)
    )
    assert [out.token_ids for out in plain] == [out.token_ids for out in scored]
    assert plain[0].prompt_logprobs is None and "prompt_logprobs" not in plain[0].to_dict()
    assert scored[0].to_dict()["prompt_logprobs"][1]["rank"] == scored[0].prompt_logprobs[1].rank


@pytest.mark.parametrize("cache", ["h2o", "streaming", "quant-8"])
def test_beside_policies_and_quantized_caches(cache: str) -> None:
    budget = {} if cache.startswith("quant") else {"kv_budget": 256}
    llm = toy_llm("none", cache=cache, **budget)
    (out,) = llm.generate(PROMPTS[:1], SamplingParams(max_new_tokens=2, prompt_logprobs=0))
    wanted = by_hand(PROMPTS[0])
    expected = [float(row[token]) for row, token in zip(wanted, PROMPTS[0][1:], strict=True)]
    assert [token.logprob for token in out.prompt_logprobs[1:]] == pytest.approx(expected, abs=0.02)


def test_who_runs_out_of_memory_leaves_the_others_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wanted all rows of a pass is gone when those of the others are taken."""
    llm = toy_llm("none")
    wanted = llm.generate(PROMPTS[1:2], SamplingParams(max_new_tokens=6))[0].token_ids
    score, engine = llm.target.score, llm.engine

    def scarce(rows: Any, **options: Any) -> Any:
        if any(part.prompt and list(part.tokens) == PROMPTS[0] for part in rows):
            raise MemoryError
        return score(rows, **options)

    monkeypatch.setattr(llm.target, "score", scarce)
    first = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=6, prompt_logprobs=0), shares=False)
    second = engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=6), shares=False)
    while not (first.over and second.over):
        engine.step()
    assert isinstance(first.error, MemoryLimitError) and second.output == wanted


def test_where_a_part_of_the_prompt_is_not_read(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=2, prompt_logprobs=0)
    with llm.conversation() as conversation:
        assert len(conversation.generate(PROMPTS[1], params).prompt_logprobs) == len(PROMPTS[1])
        with pytest.raises(InputError, match="need the whole prompt to be read"):
            conversation.generate(PROMPTS[0], params)
    with pytest.raises(InputError, match="need the whole prompt to be read"):
        llm.generate(" there was", params, prefix=llm.prefix("Once upon a time"))
    with pytest.raises(InputError, match="prompt_logprobs is -1"):
        SamplingParams(prompt_logprobs=-1)
