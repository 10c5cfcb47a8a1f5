"""A conversation's replies are those of a fresh request with the same prompt, however much of it was in the cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import VOCAB, model_of, prompt, rounds_decoding_otherwise
from sakiyomi import LLM, Generation, SamplingParams
from toys import character_tokenizer, save_model

NEW, CHUNK = 20, 16
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=3, gamma=3)
COUPLED = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=3, gamma=3, temperature=0.9, top_p=0.95, seed=1)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """None, one that is right half of the time, and one that is always wrong."""
    near, far = copy.deepcopy(model_of("llama")), copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        near.model.layers[1].mlp.up_proj.weight.mul_(1.05)
        far.lm_head.weight.neg_()
    folder = tmp_path_factory.mktemp("drafts")
    save_model(folder / "near", near, TOKENIZER)
    save_model(folder / "far", far, TOKENIZER)
    return {"none": "none", "near": f"model:{folder / 'near'}", "far": f"model:{folder / 'far'}"}


def llm_with(draft: str, model: Any = None, **options: Any) -> LLM:
    model = model_of("llama") if model is None else model
    return LLM((model, TOKENIZER), draft, compile=False, chunk_size=CHUNK, **options)


def turns(llm: LLM, params: SamplingParams) -> list[tuple[list[int], Generation]]:
    """Prompts and replies of a conversation that goes on, is asked again, is edited, is taken back, begins anew."""
    done: list[tuple[list[int], Generation]] = []

    def say(tokens: list[int]) -> list[int]:
        done.append((tokens, conversation.generate(tokens, params)))
        return tokens + done[-1][1].token_ids

    with llm.conversation() as conversation:
        first = say(prompt(37, 1))
        second = say(first + prompt(9, 2))
        say(second[:-NEW])  # again
        say(first[:-5] + prompt(14, 3))  # the end of the first reply is another one
        say(first + prompt(9, 2)[:4] + prompt(3, 4))  # the second message is another one
        say(prompt(16, 5))
        say(second + prompt(1, 6))
    assert llm.target.cache.free == llm.target.cache.max_slots
    return done


@pytest.mark.few(1)
@pytest.mark.parametrize("draft", ["none", "near", "far"])
@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_replies_are_those_of_a_fresh_request(drafts: dict[str, str], draft: str, params: SamplingParams) -> None:
    """In float32; everything that the prompt shares with the last one and its reply is used again."""
    fresh = llm_with("none")
    done = turns(llm_with(drafts[draft]), params)
    for tokens, out in done:
        assert out.token_ids == fresh.generate([tokens], params)[0].token_ids
    # Of a reply the last token is in no cache, and of a prompt the last one is always computed.
    assert [out.stats.reused for _, out in done] == [0, 56, 65, 52, 52, 0, 0]
    assert draft != "near" or sum(out.stats.accepted for _, out in done[1:]) > 20


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("draft", ["none", "near"])
def test_exact_replies_are_bit_equal(drafts: dict[str, str], dtype: torch.dtype, draft: str) -> None:
    """Tokens and log probabilities; only whole chunks of earlier prompts are used again."""
    model = copy.deepcopy(model_of("llama")).to(dtype)
    fresh = llm_with("none", model, exact=True)
    for params in (GREEDY, COUPLED):
        done = turns(llm_with(drafts[draft], model, exact=True), params)
        for tokens, out in done:
            (wanted,) = fresh.generate([tokens], params)
            assert out.token_ids == wanted.token_ids
            assert [e.top_logprobs for e in out.trace] == [e.top_logprobs for e in wanted.trace]
        assert [out.stats.reused for _, out in done] == [0, 32, 64, 48, 48, 0, 0]


@pytest.mark.thorough
def test_exact_must_not_use_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it: rows of decoding passes used again change log probabilities, in bfloat16."""
    model = copy.deepcopy(model_of("llama")).to(torch.bfloat16)
    fresh, llm = llm_with("none", model, exact=True), llm_with("none", model, exact=True)
    for each in (fresh, llm):
        rounds_decoding_otherwise(each)
    monkeypatch.setattr(llm.engine._slots, "_exact", False)
    different = 0
    for tokens, out in turns(llm, GREEDY):
        (wanted,) = fresh.generate([tokens], GREEDY)
        different += [e.top_logprobs for e in out.trace] != [e.top_logprobs for e in wanted.trace]
    assert different


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt2", "falcon"])
def test_other_attention(name: str) -> None:
    """Sliding windows, soft caps, learnt positions, attention that stays the model's own."""
    fresh, llm = (LLM((model_of(name), TOKENIZER), "none", compile=False) for _ in range(2))
    for tokens, out in turns(llm, GREEDY):
        assert out.token_ids == fresh.generate([tokens], GREEDY)[0].token_ids


def test_the_draft_keeps_its_place_too(drafts: dict[str, str], tmp_path: Path) -> None:
    """Of the second prompt the draft reads what is new, under the second request's own temperature."""
    llm = llm_with(drafts["near"])
    rows: list[int] = []
    score = llm.draft.model.score  # type: ignore[union-attr]

    def counted(segments: Any, **options: Any) -> Any:
        rows.append(sum(len(segment.tokens) for segment in segments))
        return score(segments, **options)

    llm.draft.model.score = counted  # type: ignore[union-attr]
    with llm.conversation() as conversation:
        first = conversation.generate(prompt(100, 1), GREEDY)
        assert max(rows) >= 99
        rows.clear()
        tokens = prompt(100, 1) + first.token_ids + prompt(5, 2)
        second = conversation.generate(tokens, COUPLED)
        assert max(rows) < 12
        assert second.stats.accepted > 0
        assert second.token_ids == llm_with("none").generate([tokens], COUPLED)[0].token_ids
    assert llm.draft.model.cache.free == llm.draft.model.cache.max_slots  # type: ignore[union-attr]


KEPT = [
    "h2o[local=4]",
    "snapkv[window=8,local=0]",
    "sirllm[local=4]",
    "streaming",
    "infllm[block=4,sinks=4,local=4,representatives=2]",
    "knorm[local=4,positions=reassigned]",
    "quant-8[residual=16]",
    "minference[vertical=4,slash=4,block=4]",
    "h2o[local=4]+minference[vertical=4,slash=4,block=4]",
]


@pytest.mark.thorough
@pytest.mark.parametrize("kept", KEPT)
def test_replies_where_pairs_are_evicted(drafts: dict[str, str], kept: str) -> None:
    """Boundaries, and what a prompt's rows look at, are those of a fresh request."""
    options: dict[str, Any] = {"cache": kept} | ({"kv_budget": 24} if not kept.startswith(("quant", "minf")) else {})
    fresh, full = llm_with("none", **options), llm_with("none")
    plain, near = (turns(llm_with(drafts[draft], **options), GREEDY) for draft in ("none", "near"))
    for (tokens, out), (again, other) in zip(plain, near, strict=True):
        assert out.token_ids == other.token_ids == fresh.generate([tokens], GREEDY)[0].token_ids
        assert tokens == again
    assert any(out.token_ids != full.generate([tokens], GREEDY)[0].token_ids for tokens, out in plain)
    for done in (plain, near):
        reused = [out.stats.reused for _, out in done]
        assert all(count % CHUNK == 0 for count in reused) and sum(reused) >= 64
        assert kept != KEPT[-2] or reused == [0, 32, 64, 48, 48, 0, 0], "where nothing is dropped, any chunk serves"


def test_without_borders_replies_would_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it: what a shorter prompt has evicted at its end is gone."""
    options: dict[str, Any] = {"cache": "h2o[local=4]", "kv_budget": 24}
    fresh, llm = llm_with("none", **options), llm_with("none", **options)
    monkeypatch.setattr(llm.engine._slots, "_held", lambda place, request: place.shared(request.tokens[:-1]))
    monkeypatch.setattr(llm.engine._slots._eviction, "lendable", lambda slot, length, multiple=1: length)
    done = turns(llm, GREEDY)
    assert any(out.token_ids != fresh.generate([tokens], GREEDY)[0].token_ids for tokens, out in done)


@pytest.mark.parametrize("kept", ["h2o[local=4]", "sirllm[local=4]"])
def test_replies_behind_a_prefix_where_pairs_are_evicted(kept: str) -> None:
    """Borders are counted from the prefix's end, as in requests that go on from it."""
    options: dict[str, Any] = {"cache": kept, "kv_budget": 24}
    fresh, llm = llm_with("none", **options), llm_with("none", **options)
    begin = prompt(21, 7)
    prefixes = fresh.prefix(begin), llm.prefix(begin)
    with llm.conversation(prefix=prefixes[1]) as conversation:
        tokens, reused = begin + prompt(40, 8), []
        for seed in (9, 10):
            out = conversation.generate(tokens, GREEDY)
            assert out.token_ids == fresh.generate([tokens[21:]], GREEDY, prefix=prefixes[0])[0].token_ids
            reused.append(out.stats.reused)
            tokens = [*tokens, *out.token_ids, *prompt(5, seed)]
        assert reused == [21, 53]
