"""The whole engine's samples have the target's own distribution: a real draft model, batches, warpers on both sides.

The rules themselves are tested on tables (``test_losslessness``). Here it is what the tables take for granted: that
the rows which the draft model tells are those which it drew from, after the same temperature, top-k and top-p; that
draft and verifier never share a random number; that each request of a batch is judged by its own rows. A test rejects a
right engine once in a million choices of the seed; the seed is fixed. Broken drafters stand beside it and are found.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sakiyomi import LLM, SamplingParams
from sakiyomi.drafters import Context
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.model import PackedModel
from sakiyomi.sampling import Sampler
from sakiyomi.tree import Draft
from statistical.harness import LEVEL, p_value
from text_drafters import KINDS, Wide, text_drafter
from toys import character_tokenizer, tiny_llama

V = 5
LENGTH = 4  # the prefill's token, two drafted ones, and what follows them
SAMPLES = 4000
PROMPT = [3, 1, 4]
TOKENIZER = character_tokenizer("abc")


@cache
def model(seed: int) -> Any:
    return tiny_llama(vocab=V, layers=1, dim=16, seed=seed, initializer_range=0.5)


def exact(params: SamplingParams) -> NDArray[np.float64]:
    """The target's distribution over texts of ``LENGTH`` tokens, (V ** LENGTH), from transformers' logits."""
    sampler = Sampler(params, V)
    joint = np.ones(1)
    for depth in range(LENGTH):
        texts = [list(text) for text in itertools.product(range(V), repeat=depth)]
        with torch.no_grad():
            logits = model(0)(input_ids=torch.tensor([PROMPT + text for text in texts])).logits[:, -1]
        probs = sampler.probs(sampler.process(logits, texts, PROMPT))
        joint = (joint[:, None] * probs.double().numpy()).reshape(-1)
    return joint / joint.sum()


def sample(drafter: Any, params: SamplingParams, drafted: float = 1.5) -> NDArray[np.int64]:
    """Counts of texts; a drafter has to propose more than ``drafted`` tokens a text."""
    llm = LLM((model(0), TOKENIZER), drafter, compile=False, max_batch=50)
    done = llm.generate([PROMPT], params)[0]
    assert not llm.engine._broken, "the drafter raised"
    if not isinstance(drafter, str):
        assert sum(out.stats.drafted for out in done) > drafted * SAMPLES
    seen = np.zeros(V**LENGTH, dtype=np.int64)
    for out in done:
        seen[sum(token * V**i for i, token in enumerate(reversed(out.token_ids)))] += 1
    return seen


def params(**values: Any) -> SamplingParams:
    fixed = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 1.0, "n": SAMPLES, "seed": 24, "gamma": 2}
    return SamplingParams(**(fixed | values))


def drafter(kind: type[ModelDrafter] = ModelDrafter) -> ModelDrafter:
    return kind(PackedModel(model(1), max_slots=50, compile=False), V)


WARPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"temperature": 1.6, "top_k": 4},
    "top-p": {"top_p": 0.8},
    "penalty": {"repetition_penalty": 1.8, "logit_bias": {2: 1.0}},
}


def test_the_pair_is_far_apart() -> None:
    """Where p and q are alike, a wrong rule would pass."""
    with torch.no_grad():
        p, q = (model(seed)(input_ids=torch.tensor([PROMPT])).logits[0, -1].softmax(-1) for seed in (0, 1))
    assert (p - q).abs().sum() / 2 > 0.3


@pytest.mark.parametrize("warp", ["plain", "top-p", "penalty"])
def test_ratio_with_a_draft_model(warp: str) -> None:
    """The joint distribution of four tokens."""
    values = params(acceptance="ratio", **WARPS[warp])
    p, distance = p_value(sample(drafter(), values), exact(values))
    print(f"ratio {warp}: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


def test_coupled_with_a_draft_model() -> None:
    """With and without a draft: the very same samples, and the right distribution."""
    values = params(acceptance="coupled", **WARPS["top-k"])
    seen = sample(drafter(), values)
    p, distance = p_value(seen, exact(values))
    print(f"coupled: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL
    assert np.array_equal(seen, sample("none", values))


REPEATING = [3, 1, 4, 1, 3, 1, 2, 4, 3, 1, 4, 4, 3, 1]
"""Of which something is always found, with several continuations."""


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_without_a_model(kind: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of point masses; under the ratio rule each refusal takes its token out of p, under the coupled one n-grams
    choose by the target's own noise.
    """
    monkeypatch.setattr("statistical.test_engine_distribution.PROMPT", REPEATING)
    values = params(acceptance=rule)
    drafter = Wide(text_drafter(kind, V, [REPEATING * 2]))
    p, distance = p_value(sample(drafter, values, drafted=0.4), exact(values))
    print(f"{kind} {rule}: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


class Overconfident(ModelDrafter):
    """Broken: draws at temperature 1 and tells another distribution, as if it had drawn at temperature 2."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = super().propose(contexts, gammas)
        return [_retold(draft, lambda probs: probs.sqrt()) for draft in drafts]


class Shifted(ModelDrafter):
    """Broken: each token is told with the row of another depth."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        return [_retold(draft, lambda probs: probs.roll(1, 0)) for draft in super().propose(contexts, gammas)]


class Choosy(ModelDrafter):
    """Broken: withdraws a draft after it has seen it ("prune after drawing")."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = super().propose(contexts, gammas)
        return [Draft.empty() if draft.tree.tokens[0] > 1 else draft for draft in drafts]


def _retold(draft: Draft, how: Any) -> Draft:
    if draft.probs is None:
        return draft
    probs = how(draft.probs)
    return Draft(draft.tree, draft.kind, draft.draws, probs / probs.sum(-1, keepdim=True))


@pytest.mark.parametrize("broken", [Overconfident, Shifted, Choosy])
def test_broken_drafters_are_found(broken: type[ModelDrafter]) -> None:
    """Each would pass every test of equality: nothing but the distribution shows it."""
    values = params(acceptance="ratio")
    p, distance = p_value(sample(drafter(broken), values), exact(values))
    print(f"{broken.__name__}: p = {p:.3g}, TV = {distance:.4f}")
    assert p < 1e-9
