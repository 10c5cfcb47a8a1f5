"""A module's copy in bfloat16, which runs in its place: weights are cast once a step, and not for every product."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NORMS = ("LlamaRMSNorm", "Qwen3RMSNorm")
"""Norms of transformers that compute x / rms(x) * weight, in seven passes over float32 forwards and ten backwards."""


class HalfCopy:
    """The copy, whose gradients are added to those of the module.

    Args:
        module: in float32, before its first pass; weights that are not trained are shared where they are in bfloat16.
        shared: further tensors that are not copied.

    Attributes:
        module: the copy.
    """

    def __init__(self, module: nn.Module, shared: Iterable[Tensor] = ()) -> None:
        memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
        for weight in module.parameters():
            if not weight.requires_grad:
                memo[id(weight)] = nn.Parameter(weight.detach().bfloat16(), requires_grad=False)
        self.module = copy.deepcopy(module, memo)
        for part in self.module.modules():
            if type(part).__name__ in NORMS:
                part.forward = _normed(part)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for weight, own in zip(module.parameters(), self.module.parameters(), strict=True):
            if weight.requires_grad:
                own.data = own.data.bfloat16()
                self._pairs.append((weight, own))

    @torch.no_grad()
    def take(self) -> None:
        """Copy the module's weights."""
        for weight, own in self._pairs:
            own.copy_(weight)

    @torch.no_grad()
    def give(self) -> None:
        """Add the gradients to the module's, in float32."""
        for weight, own in self._pairs:
            if own.grad is not None:
                weight.grad = own.grad.float() if weight.grad is None else weight.grad.add_(own.grad)
                own.grad = None


def _normed(norm: Any) -> Callable[[Tensor], Tensor]:
    """What a norm computes, in two passes over bfloat16 forwards and six backwards."""

    def forward(states: Tensor) -> Tensor:
        found: Tensor = _Norm.apply(states, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
        return found

    return forward


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        scale = (length.square() / states.shape[-1] + epsilon).rsqrt().to(states.dtype)
        normed = states * scale
        ctx.save_for_backward(normed, scale, weight)
        found: Tensor = normed * weight
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        both = grad * normed
        of_weight = both.flatten(0, -2).sum(0)
        shared = (both @ weight)[..., None] / normed.shape[-1]
        return (grad * weight).addcmul_(normed, shared, value=-1).mul_(scale), of_weight, None
