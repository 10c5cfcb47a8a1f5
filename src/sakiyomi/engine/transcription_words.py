"""When words are said: the text is aligned with what the decoder's cross-attention looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sakiyomi.core.transcripts import Word


def token_steps(weights: Tensor, width: int = 7) -> list[int]:
    """The place of the source where each token begins, as transformers' ``_extract_token_timestamps`` finds it.

    Args:
        weights: (heads, tokens, places) probabilities of cross-attention, of places with sound only.
        width: of the median filter over places; an odd number.

    Returns:
        A place for each token, ascending.
    """
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    smooth, half = (weights - mean) / deviation, width // 2
    if smooth.shape[-1] > half:
        smooth = torch.nn.functional.pad(smooth, (half, half), mode="reflect")
        smooth = smooth.unfold(-1, width, 1).sort()[0][..., half]
    return warp(-smooth.mean(0).double().cpu().numpy())


def warp(costs: NDArray[np.float64]) -> list[int]:
    """Dynamic time warping: the cheapest way through a matrix from corner to corner, by steps right, down or both.

    Args:
        costs: (n, m), of each cell.

    Returns:
        The column where the way enters each row.
    """
    n, m = costs.shape
    # Cells whose row and column add up to the same number depend on the two sums before only: row i of sum d is [i].
    steps = np.zeros((n + m + 1, n + 1), np.int8)
    before, last = np.full(n + 1, np.inf, np.float32), np.full(n + 1, np.inf, np.float32)
    last[0] = 0.0
    for total in range(1, n + m + 1):
        rows = np.arange(max(1, total - m), min(n, total - 1) + 1)
        found = np.full(n + 1, np.inf, np.float32)
        both, down, right = before[rows - 1], last[rows - 1], last[rows]
        chosen = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        found[rows] = costs[rows - 1, total - rows - 1] + np.choose(chosen, (both, down, right))
        steps[total, rows] = chosen
        before, last = last, found
    entered = [0] * n
    row, column = n, m
    while row > 0:
        entered[row - 1] = max(column - 1, 0)
        step = 1 if column == 0 else int(steps[row + column, row])
        row, column = row - int(step != 2), column - int(step != 1)
    return entered


def words_of(
    tokens: Sequence[int], starts: Sequence[float], end: float, chances: Sequence[float], tokenizer: Any, language: str
) -> tuple[Word, ...]:
    """The words of a text, each up to the next one.

    Args:
        tokens: of the text, without timestamps.
        starts: seconds at which each token begins.
        end: of the last word.
        chances: probability of each token.
        tokenizer: of the model.
        language: by name, in English; some have no spaces.
    """
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    texts, _, places = _combine_tokens_into_words(tokenizer, list(tokens), language)
    ends = [*starts[1:], max(end, starts[-1])] if starts else []
    return tuple(
        Word(text, starts[own[0]], ends[own[-1]], sum(chances[i] for i in own) / len(own))
        for text, own in zip(texts, places, strict=True)
    )
