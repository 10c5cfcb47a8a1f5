"""Penalties, biases, bans and processors change rows in rounds of the compiled kernels as they do in Python's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from random_models import Numbers, random_llama
from sakiyomi import LLM, InputError, RemovedError, SamplingParams
from sakiyomi.core.row_processor import RowProcessor
from sakiyomi.core.tree import Draft
from sakiyomi.drafters.base import Drafter
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.lookup import PromptLookup
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.recycle import RecycleDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.engine import engine as engine_module
from sakiyomi.engine.native_rounds import NativeRounds
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.build import build_runner
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import Rows
from sakiyomi.sampling.verifiers.greedy import GreedyVerifier
from sakiyomi.sampling.verifiers.native import Case, verify_all
from watched_rounds import watch_rounds

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")

VOCAB = 100
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], list(range(20, 29)) * 2, [9] * 5]


@pytest.fixture(autouse=True)
def untaught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python passes over the trees of last rounds when it learns: the shapes of later trees would differ."""
    monkeypatch.setattr(Confidence, "learn", lambda *_: None)


def even(history: Tensor, scores: Tensor) -> Tensor:
    """After an even token only odd ones, in another tensor than the one that was given."""
    return scores.masked_fill(torch.arange(VOCAB)[None] % 2 == history[0, -1] % 2, -torch.inf)


class Rotating(RowProcessor):
    """Prefers another token at every place."""

    def change(self, text: Sequence[int], path: Sequence[int], scores: Any) -> None:
        scores[(sum(text) + 3 * sum(path)) % VOCAB] += 1.5


EDITS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {3: 2.0, 7: -torch.inf, 40: 0.5}},
    "all": {
        "repetition_penalty": 0.8,
        "logit_bias": {3: 1.0, 8: -2.0},
        "bad_words": [[5, 6], [11]],
        "logits_processors": [Rotating(), even],
    },
}
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "top_p": 0.95},
    "ratio": {"temperature": 0.7, "acceptance": "ratio", "top_k": 30},
    "ratio tree": {"temperature": 0.7, "acceptance": "ratio", "tree": "static", "nodes": 6},
}


def grown() -> ModelDrafter:
    """A draft model, which is the target's twin but for its layers."""
    return ModelDrafter(build_runner(random_llama(64, 1, 4, 128, VOCAB, torch.float32), max_slots=3), VOCAB)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "texts": lambda: MergedDrafter([RecycleDrafter(), SuffixDrafter(), PromptLookup()]),
    "model": grown,
    "model and texts": lambda: MergedDrafter([SuffixDrafter(), grown()]),
}


@cache
def target() -> Any:
    return random_llama(64, 2, 4, 128, VOCAB, torch.float32)


def made(kind: str, params: SamplingParams) -> LLM:
    """An LLM that has run rounds of such requests."""
    llm = LLM((target(), Numbers()), DRAFTERS[kind](), max_batch=len(PROMPTS), strict=True)
    for _ in range(2):
        llm.generate(PROMPTS, params)
        llm.wait()
    return llm


def written(
    kind: str, params: SamplingParams, *, kernels: bool, others: SamplingParams | None = None
) -> tuple[list[list[int]], list[bool]]:
    """Texts, and of each round whether the kernels ran it; all requests but the first have `others`, if any."""
    llm = made(kind, others or params)
    with pytest.MonkeyPatch.context() as patch:
        seen = watch_rounds(patch, kernels=kernels)
        if not kernels:
            patch.setattr(NativeRounds, "score", lambda *_: None)
            patch.setattr(engine_module, "verify_all", lambda cases, logits: [None] * len(cases))
        asked = zip(PROMPTS, [params, *[others or params] * (len(PROMPTS) - 1)], strict=True)
        done = llm.engine.complete(llm.engine.submit(*each, key=(i,)) for i, each in enumerate(asked))
        return [out.token_ids for out in done], seen


# What is drawn depends on what was learnt of earlier drafts, and of merged ones Python passes over some.
@pytest.mark.few(8)
@pytest.mark.parametrize("edits", EDITS)
@pytest.mark.parametrize(
    ("kind", "rule"), [each for each in product(DRAFTERS, RULES) if each != ("model and texts", "ratio tree")]
)
def test_rounds_are_those_of_python(kind: str, edits: str, rule: str) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=3, gamma=4, **EDITS[edits], **RULES[rule])
    expected, _ = written(kind, params, kernels=False)
    found, seen = written(kind, params, kernels=True)
    assert all(seen) and len(seen) > 5
    assert found == expected
    plain = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=3, gamma=4, **RULES[rule])
    assert written(kind, plain, kernels=True)[0] != expected


class Forcing(RowProcessor):
    """As a grammar that knows what follows now and then: two tokens, of which one is right."""

    def change(self, text: Sequence[int], path: Sequence[int], scores: Any) -> None:
        if (len(text) + len(path)) % 5 == 0:
            scores[:] = -torch.inf
            scores[31] = 0

    def forced(self, text: Sequence[int]) -> Sequence[int]:
        return [31, 7] if len(text) % 5 == 0 else ()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["none", "texts", "model"])
def test_requests_beside_one_whose_tokens_are_known(kind: str, rule: str) -> None:
    """They draft on in the kernels, with uniforms that nobody else has used."""
    others = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=3, gamma=4, **RULES[rule])
    params = replace(others, logits_processors=[Forcing()])
    expected, _ = written(kind, params, kernels=False, others=others)
    found, seen = written(kind, params, kernels=True, others=others)
    assert all(seen) and len(seen) > 5
    assert found == expected
    assert {found[0][place] for place in range(40) if (len(PROMPTS[0]) + place) % 5 == 0} == {31}


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block"])
def test_a_processor_may_run_another_model(rule: str) -> None:
    """Which judges tokens in the same thread, in the middle of a verdict."""
    inner = LLM((random_llama(64, 1, 4, 128, 300, torch.float32), Numbers()), None, max_batch=2)
    short = SamplingParams(max_new_tokens=2, temperature=0.9, seed=1, ignore_eos=True)

    def judging(history: Tensor, scores: Tensor) -> Tensor:
        scores[0, inner.generate([history[0].tolist()], short)[0].token_ids[0] % VOCAB] += 2
        return scores

    params = SamplingParams(
        max_new_tokens=20, ignore_eos=True, seed=3, gamma=4, temperature=0.7, acceptance=rule,  # type: ignore[arg-type]
        logits_processors=[judging],
    )  # fmt: skip
    assert written("model", params, kernels=True)[0] == written("model", params, kernels=False)[0]


def test_what_a_processor_gives_is_its_own() -> None:
    own = torch.zeros(1, VOCAB)
    rows = []
    for given in (lambda *_: own, lambda _, scores: scores.bfloat16(), lambda _, s: s[:, :1].expand(1, VOCAB)):
        params = SamplingParams(max_new_tokens=5, ignore_eos=True, logits_processors=[given, Rotating()])
        rows.append(made("none", params).generate([PROMPTS[0]], params)[0].token_ids)
    assert not own.any()
    assert rows[0] == rows[2]  # all the same but one


def test_a_sampler_may_follow_another_text() -> None:
    sampler, logits = Sampler(SamplingParams(repetition_penalty=2.0), 10), torch.arange(10.0)[None]
    for text in ([9, 8], [9], [7, 6]):
        case = Case(Draft.empty(), 0, len(text), GreedyVerifier(), sampler, RequestNoise(1), text)
        (verdict,) = verify_all([case], logits)
        assert verdict is not None
        rows = Rows(logits, Sampler(sampler.params, 10), len(text), committed=text)
        assert verdict.token == GreedyVerifier().verify(Draft.empty(), rows, RequestNoise(1)).token


@pytest.mark.parametrize("kind", ["none", "texts", "model"])
def test_a_processor_that_fails_ends_its_request_alone(kind: str) -> None:
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, gamma=4, repetition_penalty=1.4)
    llm = made(kind, params)
    expected = [out.token_ids for out in llm.generate(PROMPTS, params)]

    def failing(history: Tensor, scores: Tensor) -> Tensor:
        if history.shape[1] > len(PROMPTS[0]) + 12:
            raise ValueError("a processor of somebody")
        return scores

    own = SamplingParams(
        max_new_tokens=30, ignore_eos=True, gamma=4, repetition_penalty=1.4, logits_processors=[failing]
    )
    requests = [llm.engine.submit(prompt, own if i == 0 else params) for i, prompt in enumerate(PROMPTS)]
    while llm.engine.busy:
        llm.engine.step()
    assert isinstance(requests[0].error, ValueError)
    assert 5 < len(requests[0].output) <= 13
    assert [request.output for request in requests[1:]] == expected[1:]


def test_a_row_without_tokens_is_said_as_by_python() -> None:
    params = SamplingParams(max_new_tokens=9, logit_bias=dict.fromkeys(range(VOCAB), -torch.inf))
    llm = made("none", SamplingParams(max_new_tokens=9))
    with pytest.raises(InputError, match="no token"):
        llm.generate([PROMPTS[0]], params)


def test_ctrl_c_at_the_first_token_ends_the_request() -> None:
    """The row that its first token follows from is gone."""

    def pressed(history: Tensor, scores: Tensor) -> Tensor:
        raise KeyboardInterrupt

    llm = made("none", SamplingParams(max_new_tokens=5))
    request = llm.engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=5, logits_processors=[pressed]))
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    assert isinstance(request.error, RemovedError)
    assert llm.generate(PROMPTS, SamplingParams(max_new_tokens=5))


@pytest.mark.parametrize("kind", ["texts", "model"])
def test_ctrl_c_in_a_processor_stops_between_rounds(kind: str) -> None:
    """What was pressed in the kernels comes out of ``step``, and the text goes on behind it."""
    calls = [0, 0]  # so far, and at which one it is pressed

    def pressed(history: Tensor, scores: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == calls[1]:
            raise KeyboardInterrupt
        return scores

    params = SamplingParams(max_new_tokens=30, ignore_eos=True, gamma=4, logits_processors=[pressed])
    llm = made(kind, params)
    expected = llm.generate([PROMPTS[1]], params)[0].token_ids
    request = llm.engine.submit(PROMPTS[1], params)
    for _ in range(4):
        llm.engine.step()
    calls[1] = calls[0] + 3
    with pytest.raises(KeyboardInterrupt):
        while not request.over:
            llm.engine.step()
    while not request.over:
        llm.engine.step()
    assert request.output == expected
