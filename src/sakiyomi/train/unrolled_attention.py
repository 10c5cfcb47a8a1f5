"""Attention of a head that is run step by step over whole texts, as training-time test has it (arXiv 2503.01840)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of a step to tokens with the target's features and, after them, to the draft tokens so far.

    Step s's row t sees tokens up to t - s as the target read them, and t - s + j as the j-th draft token: one token a
    column of a causal matrix, whose last s diagonals belong to the draft tokens.

    Args:
        q: (B, heads, T, width), scaled; turned as keys are.
        k, v: (B, KV heads, T, width) of this step.
        keys, values: (B, KV heads, T, width) of the steps before; those of this step are added.

    Returns:
        (B, heads, T, width of values).
    """
    keys.append(k)
    values.append(v)
    groups, times = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1]
    grouped = q.reshape(groups, times, *q.shape[2:])
    mixed: Tensor = _Attend.apply(grouped, *(part.flatten(0, 1) for part in (*keys, *values)))  # type: ignore[no-untyped-call]
    return mixed.reshape(*q.shape[:-1], v.shape[-1])


def _between(rows: Tensor, columns: Tensor) -> Tensor:
    """(G, times, T, width) by (G, T, width): (G, times, T, T) products."""
    found: Tensor = (rows.flatten(1, 2) @ columns.transpose(1, 2)).unflatten(1, rows.shape[1:3])
    return found


def _mixed(weights: Tensor, columns: Tensor) -> Tensor:
    """(G, times, T, T) by (G, T, width): (G, times, T, width)."""
    found: Tensor = (weights.flatten(1, 2) @ columns).unflatten(1, weights.shape[1:3])
    return found


def _gathered(weights: Tensor, rows: Tensor) -> Tensor:
    """(G, times, T, T) by (G, times, T, width): what each column gets, (G, T, width)."""
    return weights.flatten(1, 2).transpose(1, 2) @ rows.flatten(1, 2)


def _diagonal(matrix: Tensor, back: int) -> Tensor:
    """Of (G, times, T, T) the entries so many columns before each row's own, (G, times, T - back)."""
    return matrix.diagonal(-back, 2, 3)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, *both: Tensor) -> Tensor:
        steps, length = len(both) // 2, q.shape[2]
        keys, values = both[:steps], both[steps:]
        scores = _between(q, keys[0])
        for back in range(min(steps - 1, length)):
            own = keys[steps - 1 - back][:, None, : length - back]
            _diagonal(scores, back).copy_((q[:, :, back:] * own).sum(-1))
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = torch.softmax(scores.masked_fill_(later, -torch.inf), -1).to(values[0].dtype)
        drafted = _taken(weights, min(steps - 1, length))
        mixed = _mixed(weights, values[0])
        for back, own in enumerate(drafted):
            mixed[:, :, back:] += own[..., None] * values[steps - 1 - back][:, None, : length - back]
        ctx.save_for_backward(q, weights, *drafted, *both)
        ctx.drafted = len(drafted)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, weights, *more = ctx.saved_tensors
        drafted, both = more[: ctx.drafted], more[ctx.drafted :]
        steps, length = len(both) // 2, q.shape[2]
        keys, values = both[:steps], both[steps:]
        key_grads = [torch.zeros_like(part) for part in keys]
        value_grads = [torch.zeros_like(part) for part in values]
        of_weights = _between(grad, values[0])
        value_grads[0] = _gathered(weights, grad)
        whole = weights.clone() if drafted else weights
        for back, own in enumerate(drafted):
            step, rows = steps - 1 - back, grad[:, :, back:]
            _diagonal(of_weights, back).copy_((rows * values[step][:, None, : length - back]).sum(-1))
            _diagonal(whole, back).copy_(own)
            value_grads[step][:, : length - back] += (own[..., None] * rows).sum(1)
        scores = torch._softmax_backward_data(of_weights, whole, -1, whole.dtype)
        own_scores = _taken(scores, len(drafted))
        q_grad = _mixed(scores, keys[0])
        key_grads[0] = _gathered(scores, q)
        for back, own in enumerate(own_scores):
            step = steps - 1 - back
            q_grad[:, :, back:] += own[..., None] * keys[step][:, None, : length - back]
            key_grads[step][:, : length - back] += (own[..., None] * q[:, :, back:]).sum(1)
        return (q_grad, *key_grads, *value_grads)


def _taken(matrix: Tensor, count: int) -> list[Tensor]:
    """The first diagonals of (G, times, T, T), where zeros are left."""
    found = [_diagonal(matrix, back).clone() for back in range(count)]
    for back in range(count):
        _diagonal(matrix, back).zero_()
    return found
