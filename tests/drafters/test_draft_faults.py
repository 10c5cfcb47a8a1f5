"""What goes wrong while a draft model's tree grows: the request's own options end the draft, all else is a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import VOCAB, greedy, model_of, prompt
from sakiyomi import LLM, DraftError, SamplingParams
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.features import PassOutput
from toys import character_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
PROMPT = prompt(11, 1)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 12, "ignore_eos": True, "tree": "best-first", "nodes": 5} | values))


def llm(**options: Any) -> LLM:
    draft = ModelDrafter(build_runner(model_of("mistral"), compile=False), VOCAB)
    return LLM((model_of("llama"), TOKENIZER), draft, compile=False, **options)


def not_a_number(own: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The draft model's numbers overflow."""
    assert own.draft is not None and own.draft.model is not None
    score, calls = own.draft.model.score, [0]

    def overflown(*given: Any, **how: Any) -> PassOutput:
        calls[0] += 1
        found = score(*given, **how)
        return PassOutput(torch.full_like(found.logits, torch.nan), found.features)

    monkeypatch.setattr(own.draft.model, "score", overflown)
    return calls


def mistaken(own: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """There is a mistake in the drafter's code."""
    calls = [0]

    def divided(*_: Any) -> list[float]:
        calls[0] += 1
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Confidence, "chances", divided)
    return calls


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [not_a_number, mistaken])
def test_a_fault_of_the_drafter_is_not_silent(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``strict`` it ends the request; without, the request goes on, and the drafter is not asked again."""
    own = llm(strict=True)
    assert fault(own, monkeypatch) == [0]
    with pytest.raises(DraftError, match="drafter model failed"):
        own.generate([PROMPT], params())
    own = llm()
    calls = fault(own, monkeypatch)
    (out,) = own.generate([PROMPT], params())
    assert out.token_ids == greedy(model_of("llama"), PROMPT, 12)
    assert own.engine._speculation.broken == 1 and 1 <= calls[0] <= 2


@pytest.mark.parametrize("nodes", [3, 9])
def test_what_a_processor_raises_is_no_fault_of_the_drafter(nodes: int) -> None:
    """It raises for a text that is only drafted: the draft ends before it, and the request goes on."""
    expected = greedy(model_of("llama"), PROMPT, 12)
    raised = [0]

    def picky(input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[0].tolist()
        if text != (PROMPT + expected)[: len(text)]:
            raised[0] += 1
            raise ValueError("not that text")
        return scores

    (out,) = llm(strict=True).generate([PROMPT], params(logits_processors=[picky], nodes=nodes, gamma=4))
    assert out.token_ids == expected and raised[0]


def test_options_that_leave_no_token_are_no_fault_of_the_drafter() -> None:
    """All but the right tokens are banned, the draft's too."""
    expected = greedy(model_of("llama"), PROMPT, 12)

    def only_right(input_ids: Tensor, scores: Tensor) -> Tensor:
        text, known = input_ids[0].tolist(), PROMPT + expected
        left = torch.full_like(scores, -torch.inf)
        if text == known[: len(text)] and len(text) < len(known):
            left[:, known[len(text)]] = 0.0
        return left

    own = llm(strict=True)
    (out,) = own.generate([PROMPT], params(logits_processors=[only_right], gamma=4))
    assert out.token_ids == expected and not own.engine._speculation.broken
