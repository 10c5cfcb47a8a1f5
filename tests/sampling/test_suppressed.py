"""Suppressed tokens are those of transformers' processors."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    MinLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from sakiyomi.sampling.suppressed import lighter


@pytest.mark.parametrize("length", [1, 3, 4])
def test_the_lighter_processors_give_the_same(length: int) -> None:
    """Everywhere, and at the beginning alone."""
    ids = torch.arange(length)[None]
    scores = torch.randn(1, 50, generator=torch.Generator().manual_seed(length))
    for theirs in (SuppressTokensLogitsProcessor([3, 7, 49, 50, 220]), SuppressTokensAtBeginLogitsProcessor([0, 7], 3)):
        ours = lighter(theirs)
        assert type(ours) is not type(theirs)
        row = scores[0].clone()
        ours.change(list(range(length - 1)), [length - 1], row.numpy())
        assert torch.equal(row, theirs(ids, scores.clone())[0])


def test_other_processors_stay() -> None:
    """Among them those that need what a light one does not know."""
    other = MinLengthLogitsProcessor(3, 1)
    assert lighter(other) is other
