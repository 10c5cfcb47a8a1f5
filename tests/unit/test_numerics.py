from __future__ import annotations

import numpy as np
import pytest
import torch

from sakiyomi.noise import Uniforms
from sakiyomi.numerics import as_bits, as_row, draw, draw_distinct, from_bits, keep_top_p, largest, nucleus, top_tokens

SIZES = (1, 8, 127, 1000, 4096, 32000, 32064, 50257)


def row(size: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread).numpy()


def probs(size: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return torch.softmax(torch.from_numpy(row(size, seed, spread)), -1).numpy()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 5, 50, 256, 700])
def test_largest_holds_the_largest(size: int, count: int) -> None:
    values = row(size)
    tokens = largest(values, count)
    assert np.array_equal(tokens, np.unique(tokens))
    expected = np.sort(values)[::-1][:count]
    assert np.array_equal(np.sort(values[tokens])[::-1][:count], expected)
    # A few more than asked for, never a good part of the vocabulary.
    assert tokens.size <= max(2 * count + 50, min(count, size))


@pytest.mark.parametrize("size", SIZES)
def test_largest_has_every_tie(size: int) -> None:
    values = np.floor(row(size))
    tokens = largest(values, 10)
    least = np.sort(values)[::-1][:10][-1]
    assert set(np.flatnonzero(values >= least)) <= set(tokens)


@pytest.mark.parametrize("size", SIZES)
def test_top_tokens_prefer_the_lower_of_equals(size: int) -> None:
    values = np.floor(row(size))
    assert top_tokens(values, 7) == np.argsort(-values, kind="stable")[:7].tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.9, 0.999, 1.0])
def test_nucleus_is_that_of_a_full_sort(size: int, spread: float, mass: float) -> None:
    values = probs(size, spread=spread)
    order = np.sort(values)[::-1].astype(np.float64)
    reached = np.cumsum(order)
    least, spare = nucleus(values, mass, 1.0)
    kept = int((values >= np.float32(least)).sum()) - spare
    # The fewest that reach the mass, up to float32 sums.
    assert reached[kept - 1] >= min(mass, reached[-1]) - 1e-6
    if kept > 1:
        assert reached[kept - 2] < mass + 1e-6


def test_nucleus_splits_ties() -> None:
    values = np.full(4000, 1 / 4000, np.float32)
    least, spare = nucleus(values, 0.25, 1.0)
    assert least == values[0]
    assert spare == pytest.approx(3000, abs=1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 2.0, 3.0, 8.0])
def test_keep_top_p(size: int, spread: float) -> None:
    values = probs(size, spread=spread)
    kept = values.copy()
    support = keep_top_p(kept, 0.9)
    assert kept.sum() == pytest.approx(1.0, abs=1e-5)
    left = np.flatnonzero(kept)
    if support is not None:
        assert np.array_equal(support, left)
    assert values[left].sum(dtype=np.float64) >= 0.9 - 1e-6
    assert values[left].sum(dtype=np.float64) - values[left].min() < 0.9 + 1e-6
    gone = np.setdiff1d(np.arange(size), left)
    assert not gone.size or values[gone].max() <= values[left].min()
    assert np.allclose(kept[left], values[left] / values[left].sum(dtype=np.float64), rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_draw_is_the_inverse_of_the_cumulative_sum(size: int) -> None:
    weights = probs(size)
    reached = np.cumsum(weights.astype(np.float64))
    for uniform in np.linspace(0.0, 1.0, 200, endpoint=False):
        token = draw(weights, float(uniform))
        goal = uniform * reached[-1]
        below = reached[token - 1] if token else 0.0
        # Sums of blocks are taken in float32.
        assert below - 1e-6 <= goal <= reached[token] + 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_draw_never_gives_weight_zero(size: int) -> None:
    weights = np.zeros(size, np.float32)
    positive = np.unique(np.array([0, size // 3, size // 2, size - 2]) % size)
    weights[positive] = 1e-3
    tokens = {draw(weights, float(u)) for u in [*np.linspace(0, 1, 97, endpoint=False), 1 - 2**-53]}
    assert tokens == set(positive.tolist())
    assert {draw(weights, float(u), positive) for u in [*np.linspace(0, 1, 97, endpoint=False), 1 - 2**-53]} == tokens


def test_draw_at_the_ends() -> None:
    for size in SIZES:
        weights = np.zeros(size, np.float32)
        weights[: size // 2 + 1] = np.float32(0.1)
        assert draw(weights, 0.0) == 0
        # The largest uniform there is must not fall into the zeros behind.
        assert draw(weights, 1 - 2**-53) == size // 2


def test_draw_with_support_is_the_same_draw() -> None:
    weights = probs(32000, spread=6.0)
    weights[weights < 1e-4] = 0.0
    support = np.flatnonzero(weights)
    different = sum(
        draw(weights, u) != draw(weights, u, support) for u in np.linspace(0, 1, 500, endpoint=False).tolist()
    )
    # Only where rounding of the sums decides.
    assert different <= 2


def test_draw_distinct() -> None:
    stream = Uniforms(3)
    weights = np.array([0.5, 0.0, 0.25, 0.25], np.float32)
    for _ in range(50):
        tokens = draw_distinct(weights, 5, stream.uniform)
        assert sorted(tokens) == [0, 2, 3]
    assert weights.tolist() == [0.5, 0.0, 0.25, 0.25]
    firsts = [draw_distinct(weights, 2, stream.uniform) for _ in range(4000)]
    assert abs(sum(a == 0 for a, _ in firsts) / 4000 - 0.5) < 0.05
    # P(2 first, then 0) = 1/4 * 2/3.
    assert abs(sum(pair == [2, 0] for pair in firsts) / 4000 - 1 / 6) < 0.04


def test_bits_of_bfloat16() -> None:
    values = (torch.randn(500) * 5).bfloat16()
    bits = as_bits(values)
    assert bits is not None
    assert np.array_equal(from_bits(bits), values.float().numpy())
    assert as_bits(values.float()) is None
    positive = values.abs()
    order = as_bits(positive)
    assert order is not None
    assert np.array_equal(np.argsort(order, kind="stable"), np.argsort(positive.float().numpy(), kind="stable"))


def test_as_row() -> None:
    values = torch.randn(5)
    assert as_row(values).base is not None or np.shares_memory(as_row(values), values.numpy())
    assert np.array_equal(as_row(values.half()), values.half().float().numpy())
    assert np.array_equal(as_row(values.clone().requires_grad_()), values.numpy())
