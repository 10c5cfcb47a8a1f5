"""Numbers rounded to K formats by the kernels: as near as torch rounds them, and the same but where guesses tie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sakiyomi.kernels.build import native
from sakiyomi.model_executor.gguf import quantize
from sakiyomi.model_executor.gguf.blocks import BLOCK_TYPES, dequantize
from sakiyomi.model_executor.gguf.quantize import K_FORMATS, quantize_k

needs_kernels = pytest.mark.skipif(native() is None, reason="the C++ kernels cannot be compiled here")


def numbers(rows: int, columns: int) -> Tensor:
    """Normal ones, rows of very different sizes; zeros, a row without negative ones, and one of a single number."""
    drawn = (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 1, rows)[:, None]
    )
    drawn[:, 32:300], drawn[1] = 0, 0
    drawn[2], drawn[3], drawn[4] = drawn[2].abs(), -drawn[3].abs(), -0.5
    return drawn


def errors(kind: str, data: Tensor, values: Tensor) -> Tensor:
    """Of each block of 256, squared and relative."""
    off = (dequantize(kind, data) - values).unflatten(1, (-1, 256)).square().sum(-1)
    return off / values.unflatten(1, (-1, 256)).square().sum(-1).clamp_min(1e-30)


@needs_kernels
@pytest.mark.parametrize("kind", K_FORMATS)
def test_the_kernels_round_as_torch_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers(63, 1280)
    found = torch.from_numpy(quantize_k(kind, values))
    monkeypatch.setattr(quantize, "native", lambda: None)
    plain = torch.from_numpy(quantize_k(kind, values))
    assert found.shape == plain.shape == (63, BLOCK_TYPES[kind].row_bytes(1280))
    blocks = BLOCK_TYPES[kind].bytes
    differ = (found != plain).unflatten(1, (-1, blocks)).any(-1)
    assert differ.float().mean() < 0.05
    ours, theirs = errors(kind, found, values), errors(kind, plain, values)
    assert ours.mean() <= 1.001 * theirs.mean() and (ours <= 1.05 * theirs + 1e-12).all()
    bits = int(kind[1])
    assert ours.max() < 6 * 4.0**-bits


@needs_kernels
@pytest.mark.parametrize("kind", K_FORMATS)
def test_a_block_does_not_depend_on_the_others(kind: str) -> None:
    values = numbers(9, 768)
    whole = quantize_k(kind, values)
    size = BLOCK_TYPES[kind].bytes
    for row in range(9):
        for block in range(3):
            alone = quantize_k(kind, values[row : row + 1, 256 * block : 256 * (block + 1)])
            assert (alone == whole[row : row + 1, size * block : size * (block + 1)]).all()
