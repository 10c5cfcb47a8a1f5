from __future__ import annotations

import numpy as np
import pytest
import torch

from sakiyomi import SamplingParams
from sakiyomi.kernels.build import native
from sakiyomi.sampling import probs as probs_module
from sakiyomi.sampling import rows as rows_module
from sakiyomi.sampling.probs import fill_row
from sakiyomi.sampling.rng import Uniforms
from sakiyomi.sampling.rows import as_row, draw, draw_distinct, largest, positive_part, top_tokens

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


@pytest.fixture(params=["compiled", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernels, and without."""
    if request.param == "compiled":
        if native() is None:
            pytest.skip("the C++ kernels cannot be compiled here")
    else:
        for module in (rows_module, probs_module):
            monkeypatch.setattr(module, "loaded", lambda: None)


def nucleus(logits: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray | None]:
    out = np.empty(logits.size, np.float32)
    return out, fill_row(torch.from_numpy(logits), out, SamplingParams(temperature=1.0, top_p=top_p))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 2.0, 3.0, 8.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
def test_top_p_keeps_the_fewest_that_reach_it(size: int, spread: float, top_p: float) -> None:
    values = probs(size, spread=spread)
    kept, support = nucleus(row(size, spread=spread), top_p)
    assert kept.sum() == pytest.approx(1.0, abs=1e-5)
    left = np.flatnonzero(kept)
    if support is not None:
        assert np.array_equal(support, left)
    assert values[left].sum(dtype=np.float64) >= top_p - 1e-6
    if left.size > 1:
        # The kernel's exp is right to a few ulp of float32, and so is the mass that it adds up: 16 of them.
        assert values[left].sum(dtype=np.float64) - values[left].min() < top_p + 2e-6
    gone = np.setdiff1d(np.arange(size), left)
    assert not gone.size or values[gone].max() <= values[left].min()
    assert np.allclose(kept[left], values[left] / values[left].sum(dtype=np.float64), rtol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_top_p_splits_ties() -> None:
    """Of equal tokens at the border the higher ids stay, as many as are needed."""
    kept, _ = nucleus(np.zeros(4000, np.float32), 0.25)
    assert np.flatnonzero(kept) == pytest.approx(np.arange(3000, 4000), abs=1)


def test_the_list_of_tokens_is_given_where_it_pays() -> None:
    if native() is None:
        pytest.skip("the C++ kernels cannot be compiled here")
    assert nucleus(row(32000, spread=0.1), 0.9)[1] is None  # thousands are left
    assert nucleus(row(32000, spread=8.0), 0.9)[1] is not None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", SIZES)
def test_positive_part(size: int) -> None:
    target, other = probs(size, 1), probs(size, 2)
    left, mass = positive_part(target, other, 1e-7)
    expected = np.maximum(target.astype(np.float64) - other, 0.0)
    assert mass == pytest.approx(expected.sum(), rel=1e-5, abs=1e-9)
    if mass >= 1e-7:
        assert np.allclose(left, expected / expected.sum(), rtol=1e-4, atol=1e-9)
    assert positive_part(target, target, 1e-7)[1] == 0.0


@pytest.mark.usefixtures("kernels")
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


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", SIZES)
def test_draw_never_gives_weight_zero(size: int) -> None:
    weights = np.zeros(size, np.float32)
    positive = np.unique(np.array([0, size // 3, size // 2, size - 2]) % size)
    weights[positive] = 1e-3
    tokens = {draw(weights, float(u)) for u in [*np.linspace(0, 1, 97, endpoint=False), 1 - 2**-53]}
    assert tokens == set(positive.tolist())
    assert {draw(weights, float(u), positive) for u in [*np.linspace(0, 1, 97, endpoint=False), 1 - 2**-53]} == tokens


@pytest.mark.usefixtures("kernels")
def test_draw_at_the_ends() -> None:
    for size in SIZES:
        weights = np.zeros(size, np.float32)
        weights[: size // 2 + 1] = np.float32(0.1)
        assert draw(weights, 0.0) == 0
        # The largest uniform there is must not fall into the zeros behind.
        assert draw(weights, 1 - 2**-53) == size // 2


@pytest.mark.usefixtures("kernels")
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


def test_as_row() -> None:
    values = torch.randn(5)
    assert as_row(values).base is not None or np.shares_memory(as_row(values), values.numpy())
    assert np.array_equal(as_row(values.half()), values.half().float().numpy())
    assert np.array_equal(as_row(values.clone().requires_grad_()), values.numpy())


@pytest.mark.usefixtures("kernels")
def test_rows_of_any_layout() -> None:
    """A drafter's rows may be columns of a larger table, or one number seen many times."""
    target, other = probs(1500, 1), probs(1500, 2)
    column = np.empty((1500, 3), np.float32)
    column[:, 1] = other
    assert np.array_equal(positive_part(target, column[:, 1], 1e-7)[0], positive_part(target, other, 1e-7)[0])
    assert [draw(column[:, 1], u) for u in (0.1, 0.5, 0.9)] == [draw(other, u) for u in (0.1, 0.5, 0.9)]
    flat = np.broadcast_to(np.float32(1 / 1500), (1500,))
    expected = np.maximum(target - flat, 0.0)
    assert np.allclose(positive_part(target, flat, 1e-7)[0], expected / expected.sum(), rtol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [5, 5000])
def test_nothing_is_drawn_from_nothing(size: int) -> None:
    for weights in (np.zeros(size, np.float32), np.full(size, np.nan, np.float32)):
        with pytest.raises(ValueError, match="no weight is positive"):
            draw(weights, 0.5)


@pytest.mark.usefixtures("kernels")
def test_equal_logits_are_kept_or_dropped_alike() -> None:
    """In whatever part of the row they stand."""
    for d in np.linspace(0.5, 6.0, 200):
        logits = np.full(8192, -20.0, np.float32)
        logits[[10, 5000]], logits[6000] = 0.0, d
        out = np.empty(8192, np.float32)
        fill_row(torch.from_numpy(logits), out, SamplingParams(temperature=1.0, min_p=float(np.exp(-d))))
        assert (out[10] > 0) == (out[5000] > 0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", [{}, {"top_k": 4999}, {"top_p": 0.9}])
def test_heat_makes_no_nonsense(options: dict[str, float]) -> None:
    logits = row(5000)
    logits[3] = -np.inf
    out = np.empty(5000, np.float32)
    fill_row(torch.from_numpy(logits), out, SamplingParams(temperature=1e30, **options))
    assert np.isfinite(out).all() and out[3] == 0.0 and out.sum() == pytest.approx(1.0, abs=1e-4)
