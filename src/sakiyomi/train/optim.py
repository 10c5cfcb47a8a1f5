"""Optimizers: Muon for the matrices of the layers, AdamW for embeddings and norms."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sakiyomi.train.config import TextOptions

LAYER = re.compile(r"(^|\.)(layers|block)\.\d+$")
"""Ends the name of a layer: Llama and Whisper have ``layers``, T5 has ``block``."""


def text_optimizers(options: TextOptions, model: nn.Module) -> list[Optimizer]:
    """Muon and AdamW over all parameters of a whole model."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    layers = [layer for name, layer in model.named_modules() if LAYER.search(name)]
    # Tables of embeddings (T5 keeps one in a layer) are looked up, not multiplied with.
    linear = {id(part.weight) for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)}
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if id(parameter) in linear and options.muon_lr else others).append(parameter)
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(
            Muon(matrices, options.muon_lr, options.weight_decay, torch.bfloat16 if options.passes == "bf16" else None)
        )
    if others:
        optimizers.append(
            torch.optim.AdamW(others, lr=options.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        )
    return with_peaks(optimizers)


def with_peaks(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Each group's learning rate kept as its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def set_scale(optimizers: list[Optimizer], scale: float) -> None:
    """Set every learning rate to its peak times `scale`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scale


def copy_state(
    old: list[Optimizer], old_model: nn.Module, new: list[Optimizer], new_model: nn.Module, source: Mapping[str, str]
) -> None:
    """Give each parameter of `new_model` a copy of the moments of its source parameter in `old_model`."""
    old_parameters = dict(old_model.named_parameters())
    states = {parameter: state for optimizer in old for parameter, state in optimizer.state.items()}
    new_names = {parameter: name for name, parameter in new_model.named_parameters()}
    for optimizer in new:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = states.get(old_parameters[source[new_names[parameter]]], {})
                optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}


# ---------------------------------------------------------------- Muon


STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95


class Muon(Optimizer):
    """Muon with Nesterov momentum, for matrices.

    Source: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/). Its state is that of ``torch.optim.Muon``,
    whose iterations run in bfloat16 alone: they tell sums in another order apart, by as much as bfloat16 rounds, and
    after some dozens of steps two runs that differ in nothing else have other losses in the third digit. In float32
    they agree in the sixth.

    Args:
        weights: matrices.
        lr: learning rate.
        weight_decay: of each step, times the learning rate.
        dtype: of the iterations; None: that of the gradients.
    """

    def __init__(
        self, weights: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change the weights that have a gradient; ``closure`` is there for the interface, and None."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - MOMENTUM)
                update = orthogonal(weight.grad.lerp(momentum, MOMENTUM), self._dtype)
                rows, columns = weight.shape
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonal(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A matrix with singular values near 1 and the singular vectors of the given one.

    Args:
        matrix: (rows, columns).
        dtype: of the iterations and the result; None: the matrix's own.
    """
    a, b, c = COEFFICIENTS
    found = matrix.to(dtype or matrix.dtype)
    tall = found.size(0) > found.size(1)
    found = found.T if tall else found
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found
