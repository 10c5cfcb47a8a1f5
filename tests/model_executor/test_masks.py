"""Windows are read from mask functions, up to the largest that count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sakiyomi.model_executor.attention.masks import FAR, window_of

Mask = Callable[[object, object, torch.Tensor, torch.Tensor], torch.Tensor]


def sliding(size: int) -> Mask:
    return lambda batch, head, row, column: (column <= row) & (column > row - size)


def chunked(size: int) -> Mask:
    return lambda batch, head, row, column: (column <= row) & (column // size == row // size)


@pytest.mark.parametrize("size", [2, 4, 4096, 131_076, 1 << 18, FAR])
def test_sliding_windows_and_chunks(size: int) -> None:
    assert window_of(sliding(size)) == size
    assert window_of(chunked(size)) == -size


def test_all_columns_before_a_row_are_no_window() -> None:
    assert window_of(lambda batch, head, row, column: column <= row) == 0
    assert window_of(sliding(2 * FAR)) == 0


@pytest.mark.parametrize(
    "mask", [lambda b, h, row, column: column % 2 == 0, lambda b, h, row, column: column < row - 3]
)
def test_other_masks(mask: Mask) -> None:
    assert window_of(mask) is None
