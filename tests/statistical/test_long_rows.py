"""Rows as long as a vocabulary: the fast ways of drawing, truncating and taking the residual keep the distribution.

The table models are too short for them: blocks, support lists and bounds on Gumbel noise begin beyond a thousand
tokens. One token is tested, after a draft of one; the false alarm of a test has odds of one in a million.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sakiyomi import SamplingParams
from sakiyomi.core.tree import Draft, Draw, TokenTree
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import draw, draw_distinct
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import VERIFIERS, Rows
from statistical.harness import LEVEL, p_value

SIZE = 6000
SAMPLES = 8000
OPTIONS: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.7}, {"top_p": 0.97}, {"min_p": 0.1}]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rule", ["ratio", "ratio siblings", "coupled"])
def test_first_token(rule: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(1, SIZE, generator=generator) * 2.5
    other = logits + torch.randn(1, SIZE, generator=generator) * 1.5
    sampler = Sampler(SamplingParams(temperature=0.9, **options), SIZE)
    probs = torch.empty(1, SIZE)
    row = probs[0].numpy()
    support = sampler.fill(other[0], row)
    rows = Rows(logits.expand(3, SIZE), sampler, 9)
    verifier = VERIFIERS[rule.split()[0]]
    seen = np.zeros(SIZE, dtype=np.int64)
    accepted = 0
    for request in range(SAMPLES):
        noise = RequestNoise(31, request)
        stream = noise.fork("draft")
        if rule == "coupled":
            draft = Draft.chain(noise.top(9, row, support=support), "d")
        elif rule == "ratio":
            draft = Draft.chain([draw(row, stream.uniform(), support)], "d", probs)
        else:
            tokens = tuple(draw_distinct(row, 2, stream.uniform))
            draws = tuple(Draw(node, "d", 0) for node in range(len(tokens)))
            draft = Draft(TokenTree(tokens, (-1,) * len(tokens)), "without_replacement", draws, probs)
        verdict = verifier.verify(draft, rows, noise)
        accepted += len(verdict.path)
        seen[draft.tree.tokens[verdict.path[0]] if verdict.path else verdict.token] += 1
    target = rows.row(0).astype(np.float64)
    p, distance = p_value(seen, target / target.sum())
    print(f"{rule} {options}: p = {p:.3g}, TV = {distance:.4f}, accepted {accepted / SAMPLES:.3f}")
    assert p > LEVEL
    if rule == "ratio":
        alpha = np.minimum(target, row).sum()
        assert abs(accepted / SAMPLES - alpha) < 5 * np.sqrt(alpha * (1 - alpha) / SAMPLES)
