"""The oracle: right at the rate that it says, and its answers are the target's own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from architectures import VOCAB, greedy, model_of, prompt, references
from sakiyomi import LLM, DraftError, InputError, SamplingParams
from toys import character_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]
NEW = 24


def llm_of(draft: str, **options: Any) -> LLM:
    return LLM((model_of("llama"), TOKENIZER), draft, compile=False, **options)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True, "gamma": 3} | values))


@pytest.mark.thorough
def test_a_sure_oracle_needs_the_fewest_passes() -> None:
    llm = llm_of("oracle")
    for gamma in (1, 2, 5, 30):
        for i, out in enumerate(llm.generate(PROMPTS, params(gamma=gamma))):
            assert out.token_ids == greedy(model_of("llama"), PROMPTS[i], NEW)
            assert out.stats.rounds == math.ceil((NEW - 1) / (gamma + 1))
            assert out.stats.acceptance_rate == 1.0
    assert not llm.engine._speculation.broken


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [0.0, 0.6, 0.9])
def test_the_rate_is_alpha(rate: float) -> None:
    """Within five standard errors."""
    llm = llm_of(f"oracle:{rate}")
    done = [out for _ in range(12) for out in llm.generate(PROMPTS, params(max_new_tokens=60))]
    wanted = references("llama", PROMPTS, 60)
    assert [out.token_ids for out in done] == wanted * 12
    accepted = sum(out.stats.accepted for out in done)
    judged = accepted + sum(out.stats.rejected for out in done)
    assert judged > 500
    assert abs(accepted / judged - rate) <= 5 * (rate * (1 - rate) / judged) ** 0.5
    assert {entry.draft_prob for out in done for entry in out.trace if entry.status == "accepted"} <= {rate}


def test_seeded_text_has_an_answer_too() -> None:
    values = params(temperature=1.0, seed=4, repetition_penalty=1.2, n=2)
    expected = [[out.token_ids for out in group] for group in llm_of("none").generate(PROMPTS, values)]
    found = llm_of("oracle").generate(PROMPTS, values)
    assert [[out.token_ids for out in group] for group in found] == expected
    assert all(out.stats.acceptance_rate == 1.0 for group in found for out in group)


def test_the_answer_costs_once_and_is_told_apart() -> None:
    llm = llm_of("oracle")
    asked: list[tuple[int, ...]] = []
    own = llm.draft._answer  # type: ignore[union-attr]

    def watching(context: Any) -> Any:
        asked.append(tuple(context.tokens))
        return own(context)

    llm.draft._answer = watching  # type: ignore[union-attr]
    (first,) = llm.generate(PROMPTS[:1], params())
    (second,) = llm.generate(PROMPTS[:1], params())
    assert len(asked) == 1 and first.token_ids == second.token_ids
    assert first.stats.prefill_seconds > 3 * second.stats.prefill_seconds
    for out in (first, second):
        parts = out.stats.prefill_seconds + out.stats.draft_seconds + out.stats.score_seconds
        assert 0 < parts <= out.stats.seconds
        assert out.stats.draft_seconds < 1e-6
    llm.generate(PROMPTS[:1], params(repetition_penalty=1.4))
    for seed in (1, 2, 1):
        llm.generate(PROMPTS[:1], params(temperature=1.0, seed=seed))
    assert len(asked) == 4


def test_a_full_house_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """The answer needs a slot of the target's cache; text goes on plainly where there is none."""
    llm = llm_of("oracle", max_batch=1)
    (out,) = llm.generate(PROMPTS[:1], params())
    assert out.token_ids == greedy(model_of("llama"), PROMPTS[0], NEW)
    assert out.stats.drafted == 0 and not llm.engine._speculation.broken
    assert caplog.text.count("raise max_batch") == 1


def test_stops_are_part_of_the_answer() -> None:
    text = greedy(model_of("llama"), PROMPTS[0], NEW)
    place = next(i for i in range(6, NEW) if text[i] not in text[:i])
    for options in ({"stop_token_ids": [text[place]]}, {"stop": [TOKENIZER.decode([text[place]])]}):
        (out,) = llm_of("oracle").generate(PROMPTS[:1], params(**options))
        assert (out.token_ids, out.finish_reason) == (text[: place + 1], "stop")
        assert out.stats.acceptance_rate == 1.0


def test_what_has_no_answer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    values = params(temperature=1.0)
    (out,) = llm_of("oracle").generate(PROMPTS[:1], values)
    assert out.stats.drafted == 0 and "give a seed" in caplog.text
    with pytest.raises(DraftError, match="give a seed"):
        llm_of("oracle", strict=True).generate(PROMPTS[:1], values)


@pytest.mark.parametrize(
    ("spec", "message"), [("oracle:x", "names no rate"), ("oracle:1.5", "0 to 1.*write oracle:0.8")]
)
def test_specs(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm_of(spec)
