"""The target on an excerpt of its own cache reads ahead: its text is that of the target on all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from architectures import CONFIGS, VOCAB, model_of, prompt, settled
from sakiyomi import LLM, InputError, SamplingParams, UnsupportedError
from sakiyomi.drafters.self_evicted import PAGE, SelfEvicted, _pages
from sakiyomi.engine.plain import EngineView
from toys import character_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
PROMPTS = [prompt(150, 1), prompt(30, 2), prompt(190, 3)]
BUDGET = 64
"""Smaller than two of the prompts."""


def make(name: str, draft: str, **options: Any) -> LLM:
    return LLM((model_of(name), TOKENIZER), draft, **({"compile": False} | options))


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 40, "ignore_eos": True, "gamma": 4} | values))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*CONFIGS, "gemma", "deepseek_v3"])
def test_greedy(name: str) -> None:
    """Text of every architecture, requests of unequal lengths at once."""
    llm = make(name, f"self-evicted:{BUDGET}")
    done = llm.generate(PROMPTS, params())
    assert [out.token_ids for out in done] == [out.token_ids for out in make(name, "none").generate(PROMPTS, params())]
    assert not llm.engine._speculation.broken, "the drafter raised"
    assert sum(out.stats.accepted for out in done) > 10
    assert llm.draft.model.cache.free == 8  # type: ignore[union-attr]


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"exact": True}, {"compile": "auto"}], ids=str)
def test_other_paths(options: dict[str, Any]) -> None:
    """Recorded passes, and passes that are bit for bit equal; the same seed, and trees."""
    both = [make("llama", draft, **options) for draft in ("none", f"self-evicted:{BUDGET}")]
    if options.get("compile"):
        both = [settled(llm) for llm in both]
    more = ({"temperature": 0.9, "seed": 3}, {"nodes": 9}) if options.get("exact") else ()
    for values in ({}, *more):
        first, second = ([out.token_ids for out in llm.generate(PROMPTS, params(**values))] for llm in both)
        assert first == second


def test_turns() -> None:
    """In a conversation the excerpt is that of the present text."""
    llm, plain = make("llama", f"self-evicted:{BUDGET}"), make("llama", "none")
    tokens = list(PROMPTS[0])
    with llm.conversation() as conversation:
        for turn in range(3):
            out = conversation.generate(tokens, params(max_new_tokens=20))
            assert out.token_ids == plain.generate([tokens], params(max_new_tokens=20))[0].token_ids
            tokens = [*tokens, *out.token_ids, *prompt(5, turn)]


def test_an_excerpt_has_the_best_pages() -> None:
    """The first page, those with a key that the query may like best, and the last tokens, ascending."""
    pages = torch.zeros(1, 20, 8)  # the least numbers of keys, then the largest
    pages[0, 7, 4] = 3.0
    pages[0, 12, 1] = -3.0
    (columns,) = _pages(pages, torch.tensor([1.0, -1.0, 0, 0]), 20 * PAGE + 5, 64, 0).tolist()
    assert columns[:48] == [*range(16), *range(7 * 16, 8 * 16), *range(12 * 16, 13 * 16)]
    assert columns[48:] == list(range(20 * PAGE + 5 - 16, 20 * PAGE + 5))


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match=r"self-evicted.*cache='full'"):
        make("llama", "self-evicted", cache="h2o", kv_budget=64)
    with pytest.raises(InputError, match="self-evicted:8"):
        make("llama", "self-evicted:8")
    with pytest.raises(InputError, match="self-evicted:many"):
        make("llama", "self-evicted:many")
    with pytest.raises(UnsupportedError, match="self-evicted"):
        make("gpt_neox_japanese", "self-evicted")
    assert isinstance(make("llama", "self-evicted").draft, SelfEvicted)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"exact": True}], ids=str)
def test_a_drafter_made_later(options: dict[str, Any]) -> None:
    """``LLM.drafter``, and ``tune --draft`` with it, of a model that was loaded with another draft or none."""
    llm = make("llama", "none", **options)
    before = [out.token_ids for out in llm.generate(PROMPTS, params())]
    with llm.conversation() as conversation:
        first = conversation.generate(PROMPTS[0], params())
        rest = conversation.stream([*PROMPTS[0], *first.token_ids, *PROMPTS[1]], params())
        begun = next(rest).token_ids  # this request is under way when the drafter is made
        drafter = llm.drafter(f"self-evicted:{BUDGET}")
        text = [*begun, *(token for step in rest for token in step.token_ids)]
    whole = [*PROMPTS[0], *first.token_ids, *PROMPTS[1]]
    assert text == make("llama", "none", **options).generate([whole], params())[0].token_ids
    done = EngineView(llm, drafter, strict=True).generate(PROMPTS, params())
    assert [out.token_ids for out in done] == before
    assert sum(out.stats.accepted for out in done) > 10
    assert [out.token_ids for out in llm.generate(PROMPTS, params())] == before
    assert llm.drafter("self-evicted") is not drafter
