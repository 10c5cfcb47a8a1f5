"""Texts that were begun elsewhere: what was given of them is verified, and they go on as they would have."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from sakiyomi import LLM, DivergedError, Generation, InputError, SamplingParams
from server_toys import toy_llm

KINDS: dict[str, dict[str, Any]] = {
    "a draft": {},
    "no draft": {"draft": "none"},
    "eviction": {"cache": "h2o", "kv_budget": 24, "chunk_size": 16},
    "quantized": {"cache": "quant-8"},
    "exact": {"exact": True},
}


@functools.cache
def llm_of(kind: str) -> LLM:
    return toy_llm(**KINDS[kind])


def written(llm: LLM, params: SamplingParams, **options: Any) -> Generation:
    request = llm.engine.submit("Number one of the first and", params, **options)
    return llm.engine.complete([request])[0]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_goes_on_as_it_would_have(kind: str, temperature: float) -> None:
    """Cut anywhere, before and behind eviction boundaries; rounds of a hundred tokens and of none."""
    llm = llm_of(kind)
    params = SamplingParams(max_new_tokens=90, temperature=temperature, seed=3, acceptance="coupled", ignore_eos=True)
    right = written(llm, params)
    for cut in (1, 7, 20, 71, 90):
        found = written(llm, params, given=right.token_ids[:cut])
        assert (found.token_ids, found.text) == (right.token_ids, right.text)
        assert [entry.source == "given" for entry in found.trace[:cut]] == [True] * cut
        assert found.stats.tokens == 90 and found.stats.committed <= 90 - cut


@pytest.mark.parametrize("place", [0, 1, 5, 8])
def test_another_text_is_refused(place: int) -> None:
    """The rule that takes whatever it is given would let this pass."""
    llm = llm_of("a draft")
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, acceptance="coupled", ignore_eos=True)
    given = written(llm, params).token_ids[:9]
    given[place] ^= 1
    with pytest.raises(DivergedError, match=f"token {place} of the text"):
        written(llm, params, given=given)
    assert not llm.engine.busy


def test_others_in_the_round_are_not_disturbed() -> None:
    llm = llm_of("a draft")
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    right = [llm.generate(text, params).token_ids for text in ("Number", "Say")]
    requests = [
        llm.engine.submit("Number", params, given=right[0][:20]),
        llm.engine.submit("Say", params),
    ]
    assert [done.token_ids for done in llm.engine.complete(requests)] == right


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ({"temperature": 1.0}, [1], "follows from its seed alone"),
        ({"temperature": 1.0, "seed": 1, "acceptance": "ratio"}, [1], "follows from its seed alone"),
        ({}, [320], "given has token 320; the model's vocabulary has 320 tokens"),
        ({"max_new_tokens": 2}, [1, 2, 3], "given has 3 tokens and max_new_tokens is 2"),
    ],
)
def test_what_cannot_be_given(options: dict[str, Any], given: list[int], said: str) -> None:
    llm = llm_of("no draft")
    with pytest.raises(InputError, match=said):
        llm.engine.submit("Number", SamplingParams(**options), given=given)
