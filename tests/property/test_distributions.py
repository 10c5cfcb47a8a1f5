from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sakiyomi import SamplingParams
from sakiyomi.core.tree import TokenTree
from sakiyomi.sampling.probs import reference_probs
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import draw
from sakiyomi.sampling.sampler import Sampler
from target_rows import to_probs

OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 5.0),
        "top_k": st.integers(0, 60),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    }
)


@st.composite
def scores(draw: st.DrawFn, most: int = 6000) -> torch.Tensor:
    """One row. Random numbers come from a seed: what is searched is the shape, not the single float."""
    size = draw(st.integers(2, most))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.floats(0.0, 12.0))
    offset = draw(st.floats(-100.0, 100.0))
    row = torch.randn(1, size, generator=generator) * spread + offset
    return row.bfloat16() if draw(st.booleans()) else row


def on_a_border(row: torch.Tensor, params: SamplingParams) -> bool:
    """Whether float32 rounding decides if a token is kept, or tokens equal up to it stand at the border."""
    sorted_logits = row.float().double()[0].sort(descending=True).values / params.temperature
    if 0 < params.top_k < len(sorted_logits):
        inside, outside = sorted_logits[params.top_k - 1 : params.top_k + 1].tolist()
        if 0 < inside - outside < 1e-5 * max(1.0, abs(inside)):
            return True
        sorted_logits = sorted_logits[sorted_logits >= sorted_logits[params.top_k - 1]]
    probs = sorted_logits.softmax(-1)
    reached = probs.cumsum(-1)
    if params.top_p < 1.0:
        if (reached - params.top_p).abs().min() < 1e-5:
            return True
        last = int((reached < params.top_p).sum())
        if last + 1 < len(probs) and probs[last] - probs[last + 1] < 1e-5 * probs[last]:
            return True
    return bool(params.min_p and ((probs / probs[0] - params.min_p).abs() < 1e-5).any() and params.min_p < 1.0)


def warped(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), row.float()).softmax(-1)


@given(scores(), OPTIONS)
def test_rows_are_distributions_and_agree(row: torch.Tensor, options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    probs = Sampler(params, row.shape[1]).probs(row)
    assert float(probs.min()) >= 0.0
    assert abs(float(probs.double().sum()) - 1.0) < 1e-5
    # What is kept is more probable than what is not.
    kept = probs[0] > 0
    assert bool(kept.any())
    assume(not on_a_border(row, params))
    # These round each quotient, which is an error of that size in the exponent.
    rounding = 1e-6 + 2e-7 * float(row.abs().max()) / max(params.temperature, 1e-3)
    for clear in (reference_probs(row, params), warped(row, params)):
        assert bool(((probs - clear).abs() <= 1e-6 + rounding * clear).all())


@given(scores(300), st.integers(0, 50))
def test_tends_to_one_hot(row: torch.Tensor, top_k: int) -> None:
    top = row.float()[0].topk(2).values
    assume(float(top[0] - top[1]) > 1e-2)
    best = int(row.argmax())
    mass = [
        float(Sampler(SamplingParams(temperature=t, top_k=top_k), row.shape[1]).probs(row)[0, best])
        for t in (1.0, 0.3, 0.1, 0.01, 1e-3, 1e-5, 0.0)
    ]
    assert all(b >= a - 1e-6 for a, b in pairwise(mass))
    assert mass[-1] == 1.0
    assert mass[-2] > 1 - 1e-6


@given(scores(2000), OPTIONS, st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 2**40))
def test_draws_come_from_the_support(row: torch.Tensor, options: dict[str, Any], uniform: float, position: int) -> None:
    out = np.empty(row.shape[1], np.float32)
    support = Sampler(SamplingParams(**options), row.shape[1]).fill(row[0], out)
    noise = RequestNoise(1)
    for token in (draw(out, uniform), draw(out, uniform, support), *noise.top(position, out, 3)):
        assert out[token] > 0
    assert noise.top(position, out) == RequestNoise(1).top(position, out, support=support)
    clear = torch.from_numpy(out).double().log() + noise.gumbel(position, out.size).double()
    # Ties of the float32 Gumbel aside, that is the argmax.
    assert float(clear[noise.top(position, out)[0]]) >= float(clear.max()) - 1e-5


@given(st.integers(1, 8), st.integers(0, 2**32))
def test_to_probs_rows_are_those_of_their_histories(size: int, seed: int) -> None:
    """A penalty makes the rows differ by history: the tree's rows are those of each path scored alone."""
    generator = torch.Generator().manual_seed(seed)
    parents = tuple(int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(size))
    tokens = tuple(torch.randint(0, 12, (size,), generator=generator).tolist())
    tree = TokenTree(tokens, parents)
    logits = torch.randn(size + 1, 12, generator=generator)
    params = SamplingParams(temperature=0.9, repetition_penalty=1.5, top_p=0.9)
    probs = to_probs(logits, tree, [1, 2], params)
    for node in range(-1, size):
        history = [1, 2, *tree.path_tokens(node)]
        alone = to_probs(logits[node + 1 : node + 2], TokenTree(), history, params)
        assert torch.equal(probs[node + 1 : node + 2], alone)
