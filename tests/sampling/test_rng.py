from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from sakiyomi.sampling.rng import _SCALE, RequestNoise, Uniforms


def weights(size: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(size, generator=generator) * spread, -1).numpy()


def clear_top(noise: RequestNoise, position: int, row: np.ndarray, count: int) -> list[int]:
    gumbel = noise.gumbel(position, row.size).double() + torch.from_numpy(row).double().log()
    return gumbel.topk(count).indices.tolist()


@pytest.mark.parametrize("size", [8, 600, 32000, 32064])
def test_top_is_the_argmax_of_log_p_plus_gumbel(size: int) -> None:
    noise = RequestNoise(3, 1)
    for seed in range(40):
        row = weights(size, seed, spread=seed % 7)
        assert noise.top(seed, row) == clear_top(noise, seed, row, 1)
        assert noise.top(seed, row, 4) == clear_top(noise, seed, row, 4)


@pytest.mark.parametrize("size", [8, 32000])
def test_support_changes_nothing(size: int) -> None:
    for seed in range(40):
        row = weights(size, seed)
        row[np.argsort(row)[: -max(2, size // 500)]] = 0.0
        support = np.flatnonzero(row)
        sparse = RequestNoise(3).top(7, row, support=support)
        assert sparse == RequestNoise(3).top(7, row) == clear_top(RequestNoise(3), 7, row, 1)
        assert RequestNoise(3).top(7, row, 2, support) == RequestNoise(3).top(7, row, 2)


def test_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [weights(32000, seed, spread=seed % 7) for seed in range(20)]
    supports = [None, np.arange(3, 32000, 7)]

    def ranked() -> list[tuple[list[int], list[float]]]:
        return [
            RequestNoise(4).ranked(
                i, row if support is None else np.where(np.isin(np.arange(32000), support), row, 0), 5, support
            )
            for i, row in enumerate(rows)
            for support in supports
        ]

    compiled = ranked()
    monkeypatch.setattr("sakiyomi.sampling.rng.loaded", lambda: None)
    for (tokens, sums), (same, others) in zip(compiled, ranked(), strict=True):
        assert list(tokens) == same
        assert list(sums) == pytest.approx(others, rel=1e-9)


def test_top_gives_no_token_of_weight_zero() -> None:
    row = np.zeros(32000, np.float32)
    row[[5, 31999]] = 0.5
    assert sorted(RequestNoise(1).top(0, row, 4)) == [5, 31999]
    assert sorted(RequestNoise(1).top(0, row, 4, np.array([5, 31999]))) == [5, 31999]


def test_only_token_always_wins() -> None:
    row = np.zeros(64, np.float32)
    row[9] = 1.0
    for position in range(2000):
        assert RequestNoise(0).top(position, row) == [9]


def test_noise_is_a_function_of_its_key() -> None:
    row = weights(1000)
    alone = {position: RequestNoise(5, 2).top(position, row) for position in range(60)}
    noise = RequestNoise(5, 2)
    # Any order, any repetition, other calls in between.
    for position in [*range(59, -1, -1), 3, 50, 3]:
        noise.uniform()
        noise.fork("draft").uniform()
        assert noise.top(position, row) == alone[position]
    assert noise.top(3, row) == alone[3]


def test_smaller_vocabulary_sees_a_prefix() -> None:
    noise = RequestNoise(8)
    assert torch.equal(noise.gumbel(4, 100), noise.gumbel(4, 5000)[:100])
    row = weights(5000)
    padded = np.append(row, np.zeros(700, np.float32))
    assert noise.top(4, row) == noise.top(4, padded) == RequestNoise(8).top(4, padded)


def test_keys_differ() -> None:
    keys = [(0,), (1,), (-1,), (2**64 - 2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (0, 1, 2), (0, 2, 1), (0, 0, 0)]
    firsts = {RequestNoise(seed, *key).uniform() for seed, *key in keys}
    assert len(firsts) == len(keys)
    rows = {tuple(RequestNoise(seed, *key).gumbel(0, 4).tolist()) for seed, *key in keys}
    assert len(rows) == len(keys)


def test_streams_are_apart_and_go_on() -> None:
    noise = RequestNoise(1, 0)
    own = [noise.uniform() for _ in range(3)]
    draft = [noise.fork("draft").uniform() for _ in range(3)]
    other = [noise.fork("other").uniform() for _ in range(3)]
    assert len({*own, *draft, *other}) == 9
    again = RequestNoise(1, 0)
    # Interleaving does not matter.
    mixed = [(again.fork("draft").uniform(), again.uniform()) for _ in range(3)]
    assert [b for _, b in mixed] == own
    assert [a for a, _ in mixed] == draft


def test_requests_do_not_depend_on_the_batch() -> None:
    row = weights(50)
    alone = [[RequestNoise(9, i).top(t, row) for t in range(10)] for i in range(4)]
    batch = [RequestNoise(9, i) for i in range(4)]
    together: list[list[list[int]]] = [[] for _ in range(4)]
    for t in range(10):
        for i in (2, 0, 3, 1):
            together[i].append(batch[i].top(t, row))
    assert together == alone


def test_uniforms_are_uniform() -> None:
    """One false alarm in a million seeds each."""
    stream = Uniforms(1234)
    long = np.array([stream.uniform() for _ in range(50_000)])
    first = np.array([RequestNoise(77, i).uniform() for i in range(50_000)])
    for values in (long, first):
        assert values.min() >= 0.0
        assert values.max() < 1.0
        assert stats.kstest(values, "uniform").pvalue > 1e-6
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(50_000)


def raw(noise: RequestNoise, position: int, size: int) -> np.ndarray:
    return noise._noise(position, np.arange(size)).astype(np.float64) * _SCALE


def test_noise_is_uniform_and_independent() -> None:
    """Over tokens, positions, requests and seeds, and between neighbours in each; one false alarm in 10^5 seeds."""
    size, count = 4096, 64
    noise = RequestNoise(0)
    by_position = np.stack([raw(noise, position, size) for position in range(count)])
    by_request = np.stack([raw(RequestNoise(0, request), 0, size) for request in range(count)])
    by_seed = np.stack([raw(RequestNoise(seed), 0, size) for seed in range(count)])
    for values in (by_position, by_request, by_seed):
        assert values.min() > 0.0
        assert values.max() < 1.0
        assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-6
        # The low tail decides who wins, so it is looked at through a magnifying glass.
        tail = values[values < 0.01]
        assert stats.kstest(tail / 0.01, "uniform").pvalue > 1e-6
        for shifted in (values[1:], np.roll(values[1:], 1, axis=1)):
            for change in (np.asarray, np.log):
                correlation = np.corrcoef(change(values[:-1]).ravel(), change(shifted).ravel())[0, 1]
                assert abs(correlation) < 5 / np.sqrt(shifted.size)


def test_bits_of_noise_flip_with_every_bit_of_the_key() -> None:
    size = 2048
    base = raw(RequestNoise(0), 0, size)
    for changed in [RequestNoise(1 << bit) for bit in range(0, 64, 7)] + [
        RequestNoise(0, 1 << bit) for bit in range(0, 64, 7)
    ]:
        assert abs(np.corrcoef(base, raw(changed, 0, size))[0, 1]) < 5 / np.sqrt(size)


def test_two_winners_are_independent() -> None:
    """Winners at neighbouring positions, over requests: chi-square on the pairs, one false alarm in a million."""
    row = np.array([0.4, 0.3, 0.2, 0.1], np.float32)
    seen = np.zeros((4, 4))
    for request in range(8000):
        noise = RequestNoise(2, request)
        seen[noise.top(5, row)[0], noise.top(6, row)[0]] += 1
    expected = np.outer(row, row).astype(float)
    expected *= seen.sum() / expected.sum()
    assert stats.chisquare(seen.ravel(), expected.ravel()).pvalue > 1e-6
