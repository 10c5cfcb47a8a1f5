from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sakiyomi import SamplingParams
from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import TokenTree
from sakiyomi.kernels.build import native
from sakiyomi.sampling.probs import best, best_token, chance, fill_row, reference_probs
from sakiyomi.sampling.sampler import Sampler
from target_rows import to_probs

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.8, "top_k": 100_000},
    {"temperature": 0.9, "top_k": 700},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
]
SIZES = (8, 1000, 32000, 50257)


def logits(rows: int, size: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """As transformers' generate composes them."""
    warpers = LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(len(scores), 1, dtype=torch.int64), scores.float()).softmax(-1)


def name(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in options.items())


@pytest.mark.parametrize("options", OPTIONS, ids=name)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.3, 2.0, 5.0])
def test_agrees_with_transformers_warpers(options: dict[str, Any], size: int, spread: float) -> None:
    params = SamplingParams(**options)
    scores = logits(3, size, spread)
    mine = Sampler(params, size).probs(scores)
    assert mine.dtype == torch.float32
    assert torch.allclose(mine.sum(-1), torch.ones(3), atol=1e-5)
    clear = reference_probs(scores, params)
    theirs = warped(scores, params)
    for other in (theirs, clear):
        # A nucleus may end one token sooner or later where the float32 sums of V terms decide.
        close = (mine - other).abs() <= 1e-6
        kept = (mine > 0) == (other > 0)
        assert torch.all(close) or (int((~kept).sum()) <= 1 and float((mine - other).abs().max()) < 2e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
@pytest.mark.parametrize("shift", [0.0, -30.0])
def test_bfloat16_with_its_many_ties(options: dict[str, Any], shift: float) -> None:
    """As many tokens as transformers keeps; which of equal ones, its sort decides. Shifted, all logits are negative."""
    params = SamplingParams(**options)
    scores = (logits(3, 4000, 2.0) + shift).bfloat16()
    mine = Sampler(params, 4000).probs(scores)
    theirs = warped(scores, params)
    clear = reference_probs(scores, params)
    for row in range(3):
        for other, same in (
            (theirs, (mine[row].sort().values - theirs[row].sort().values).abs()),
            (clear, (mine[row] - clear[row]).abs()),
        ):
            border = int((mine[row] > 0).sum()) - int((other[row] > 0).sum())
            assert abs(border) <= 1
            assert same.max() < (1e-6 if border == 0 else 1e-3)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_support_is_where_the_probability_is(options: dict[str, Any]) -> None:
    for size in SIZES:
        out = np.empty(size, np.float32)
        sampler = Sampler(SamplingParams(**options), size)
        for dtype in (torch.float32, torch.bfloat16):
            support = sampler.fill(logits(1, size, 3.0)[0].to(dtype), out)
            assert support is None or np.array_equal(support, np.flatnonzero(out))


@pytest.mark.skipif(native() is None, reason="the C++ kernels cannot be compiled here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 63, 64, 65, 1000, 32003])
def test_the_compiled_softmax(size: int, dtype: torch.dtype) -> None:
    """Against float64, at every length of the last vector; -inf is 0, and what is no number is refused."""
    for spread, temperature in ((0.3, 1.0), (3.0, 0.7), (30.0, 1.3), (3.0, 0.01)):
        row = logits(1, size, spread)[0].to(dtype)
        if size > 2:
            row[size // 2] = -torch.inf
        out = np.full(size + 1, 7.0, np.float32)
        fill_row(row, out[:size], SamplingParams(temperature=temperature))
        exact = (row.double() / temperature).softmax(-1).numpy()
        assert np.abs(out[:size] - exact).max() < 1e-6
        # A rounding of the largest quotient is an error of that size in every exponent.
        rounding = 2e-6 + 3e-7 * float(row[row > -torch.inf].abs().max()) / temperature
        assert np.allclose(out[:size], exact, rtol=rounding, atol=1e-30)
        assert out[size] == 7.0, "written beyond the row"
    for value in (torch.nan, torch.inf, -torch.inf):
        row = torch.full((size,), value) if value == -torch.inf else logits(1, size, 1.0)[0]
        row[-1] = value
        with pytest.raises(InputError, match="no token is left"):
            fill_row(row.to(dtype), np.empty(size, np.float32), SamplingParams(temperature=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 17, 64, 1000, 32003])
def test_the_chance_of_a_token(size: int, dtype: torch.dtype) -> None:
    for spread in (0.3, 3.0, 30.0):
        row = logits(1, size, spread)[0].to(dtype)
        if size > 2:
            row[size // 2] = -torch.inf
        wanted = row.double().softmax(-1)
        for token in {0, size // 3, size - 1, int(row.float().argmax())}:
            assert chance(row, token) == pytest.approx(float(wanted[token]), rel=2e-5, abs=1e-30)
        assert best(row) == (int(row.float().argmax()), pytest.approx(float(wanted.max()), rel=2e-5))
    assert size < 3 or chance(row, size // 2) == 0.0
    row[-1] = torch.inf
    assert best(row) == (size - 1, 1.0)
    row[-1] = torch.nan
    with pytest.raises(InputError, match="no token is left"):
        best(row)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    scores = logits(6, 32000, 3.0)
    for options in OPTIONS:
        sampler = Sampler(SamplingParams(**options), 32000)
        together = sampler.probs(scores)
        alone = torch.cat([sampler.probs(scores[i : i + 1]) for i in range(6)])
        assert torch.equal(together, alone)


def test_logits_are_left_alone() -> None:
    scores = logits(2, 5000, 3.0)
    before = scores.clone()
    for options in [*OPTIONS, {"temperature": 0.0}]:
        Sampler(SamplingParams(**options), 5000).probs(scores)
    assert torch.equal(scores, before)


def test_out_is_written_to() -> None:
    out = torch.empty(2, 100)
    sampler = Sampler(SamplingParams(temperature=1.0), 100)
    assert sampler.probs(logits(2, 100, 1.0), out) is out
    assert torch.equal(out, sampler.probs(logits(2, 100, 1.0)))


def test_greedy_is_the_first_argmax() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, -1.0], [-5.0, -2.0, -2.0, -9.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert [best_token(row) for row in scores.to(dtype)] == [1, 1]
        probs = Sampler(SamplingParams(), 4).probs(scores.to(dtype))
        assert probs.tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
        assert torch.equal(reference_probs(scores.to(dtype), SamplingParams()), probs)


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-20, 1e-29])
@pytest.mark.parametrize("top_k", [0, 3])
def test_small_temperatures_do_not_overflow(temperature: float, top_k: int) -> None:
    scores = torch.tensor([[10.0, 80.0, 79.0, -40.0, 3.0]])
    probs = Sampler(SamplingParams(temperature=temperature, top_k=top_k), 5).probs(scores)
    assert probs[0].tolist() == pytest.approx([0, 1, 0, 0, 0], abs=1e-30)


@pytest.mark.parametrize("options", [*OPTIONS, {"temperature": 0.0}], ids=name)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_choice_are_refused(options: dict[str, Any], value: float, dtype: torch.dtype) -> None:
    for size in (16, 8000):
        with pytest.raises(InputError, match="no token is left"):
            Sampler(SamplingParams(**options), size).probs(torch.full((1, size), value, dtype=dtype))


def test_banned_tokens_have_probability_zero() -> None:
    scores = logits(1, 5000, 1.0)
    scores[0, 100:] = -math.inf
    for options in OPTIONS:
        probs = Sampler(SamplingParams(**options), 5000).probs(scores)
        assert probs[0, 100:].sum() == 0.0
        assert probs.sum().item() == pytest.approx(1.0, abs=1e-5)


# History


class Recorder(LogitsProcessor):
    """Notes the histories that it is shown, and bans the last token of each; writes in place, as some do."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == 1
        assert scores.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        scores[:, input_ids[0, -1]] = -math.inf
        return scores


TREE = TokenTree((3, 4, 5, 6), (-1, 0, 0, -1))
COMMITTED = [9, 8, 9]


def test_each_row_sees_its_own_path() -> None:
    recorder = Recorder()
    scores = logits(5, 16, 1.0)
    before = scores.clone()
    params = SamplingParams(temperature=1.0, logits_processors=[recorder])
    probs = to_probs(scores, TREE, COMMITTED, params)
    assert recorder.seen == [[9, 8, 9], [9, 8, 9, 3], [9, 8, 9, 3, 4], [9, 8, 9, 3, 5], [9, 8, 9, 6]]
    assert [int(row.argmin()) for row in probs] == [9, 3, 4, 5, 6]
    assert torch.equal(scores, before)


def test_penalty_and_bans_are_transformers_own() -> None:
    scores = logits(5, 16, 2.0)
    bad_words = [[7], [9, 3], [3, 4, 2]]
    params = SamplingParams(
        temperature=0.7, repetition_penalty=1.4, bad_words=bad_words, logit_bias={1: 2.5, 2: -math.inf}
    )
    sampler = Sampler(params, 16)
    assert sampler.edits
    assert sampler.needs_history
    paths = [TREE.path_tokens(node) for node in range(-1, 4)]
    mine = sampler.process(scores, paths, COMMITTED)
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), NoBadWordsLogitsProcessor(bad_words)])
    for row, path in enumerate(paths):
        biased = scores[row : row + 1].clone()
        biased[0, 1] += 2.5
        biased[0, 2] = -math.inf
        expected = theirs(torch.tensor([[*COMMITTED, *path]]), biased)
        assert torch.equal(mine[row : row + 1], expected)
    assert mine[0, 7] == -math.inf
    # [9, 3] is banned only where 9 came last.
    assert mine[0, 3] == -math.inf
    assert mine[1, 3] != -math.inf
    assert torch.equal(sampler.process(scores, paths, torch.tensor(COMMITTED)), mine)


def test_nothing_to_do_is_no_copy() -> None:
    sampler = Sampler(SamplingParams(temperature=0.7, top_k=5), 16)
    scores = logits(2, 16, 1.0)
    assert not sampler.edits
    assert sampler.process(scores) is scores


def test_bias_alone_needs_no_history() -> None:
    sampler = Sampler(SamplingParams(logit_bias={3: 1.5}), 16)
    assert sampler.edits
    assert not sampler.needs_history
    scores = logits(2, 16, 1.0).bfloat16()
    expected = scores.float()
    expected[:, 3] += 1.5
    assert torch.equal(sampler.process(scores), expected)


def test_tokens_outside_the_vocabulary() -> None:
    bias, ban = SamplingParams(logit_bias={16: 1.0}), SamplingParams(bad_words=[[3, 16], [2]])
    for params in (bias, ban):
        with pytest.raises(InputError, match="token 16; the vocabulary has 16"):
            Sampler(params, 16)


def test_words_must_be_tokens_by_now() -> None:
    with pytest.raises(InputError, match="'darn'"):
        Sampler(SamplingParams(bad_words=["darn"]), 16)


def test_processor_with_another_shape_is_named() -> None:
    def flat(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[0]

    with pytest.raises(InputError, match="logits processor function gave scores of shape"):
        Sampler(SamplingParams(logits_processors=[flat]), 16).process(logits(1, 16, 1.0), [()], [1])
