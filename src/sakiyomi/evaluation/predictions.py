"""The target's probabilities at every position of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sakiyomi.core.errors import InputError
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.probs import chance, leading

_ROWS = 64  # logits of so many places at once


@dataclass(frozen=True)
class Prediction:
    """One position of a text.

    Attributes:
        token: at this position.
        prob: its probability under the target at temperature 1; None for the first token, which nothing precedes.
        top: (token, probability) of the most probable ones, best first.
    """

    token: int
    prob: float | None
    top: tuple[tuple[int, float], ...] = ()


def predictions(model: ModelRunner, tokens: Sequence[int], count: int) -> list[Prediction]:
    """The model's predictions at every position of a text, and at the one after it.

    Args:
        model: the target; it has a free slot.
        tokens: the text, at least one token.
        count: most probable tokens to name, at least 1.

    Returns:
        One entry per token, and a last one with token -1 for the position after the text.

    Raises:
        InputError: the text is longer than the model's context, or ``count`` is below 1.
    """
    if not 0 < len(tokens) <= model.max_context:
        raise InputError(f"a text of {len(tokens)} tokens; the model's context holds 1 to {model.max_context}")
    if count < 1:
        raise InputError(f"top is {count}; expected at least 1")
    found = [Prediction(tokens[0], None)]
    following = [*tokens[1:], -1]
    with torch.no_grad(), model.cache.lent(len(tokens)) as slot:
        for first in range(0, len(tokens), _ROWS):
            chunk = tokens[first : first + _ROWS]
            logits = model.score([SequenceRows(slot, first, chunk, prompt=True)]).logits.float().cpu()
            best = leading(logits, count)
            for row, token, listed in zip(logits, following[first : first + _ROWS], best, strict=True):
                top = tuple((other, math.exp(score)) for other, score in zip(*listed, strict=True))
                found.append(Prediction(token, chance(row, token) if token >= 0 else None, top))
    return found
