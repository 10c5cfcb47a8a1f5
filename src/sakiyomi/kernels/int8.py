"""Weights of 8 bits: which layers can take them, and what they change, measured on a text before and after."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sakiyomi.kernels.pack import PACKED

__all__ = ["OUTLIER", "Int8Report", "compare", "layer_errors"]

OUTLIER = 0.05  # relative error of a layer's output, above which it keeps its weights; rounding alone makes about 0.01


@dataclass(frozen=True, slots=True)
class Int8Report:
    """What the rounding changed, on ``tokens`` tokens.

    Attributes:
        layers: linear layers in 8 bits.
        kept: names of those that kept their weights, because a few of their inputs or weights outgrow the others.
        agreement: share of positions with the same most probable token.
        divergence: mean KL divergence of the rounded model's next-token distribution from the model's own, in nats.
        tokens: of the text.
    """

    layers: int
    kept: tuple[str, ...]
    agreement: float
    divergence: float
    tokens: int

    def __str__(self) -> str:
        kept = f", {len(self.kept)} kept as they were ({', '.join(self.kept[:3])}{', ...' * (len(self.kept) > 3)})"
        return (
            f"int8: {self.layers} layers{kept if self.kept else ''}; on {self.tokens} tokens the most probable token "
            f"is the same {self.agreement:.1%} of the time, mean KL divergence {self.divergence:.4f} nats"
        )


def _rounded(values: Tensor) -> Tensor:
    """Each row to 8 bits and back."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (values / scale).round() * scale


def layer_errors(model: nn.Module, ids: Tensor) -> tuple[dict[int, float], Tensor]:
    """Relative error that 8 bits make in each linear layer's output, by the layer's id, and the model's logits (T, V).

    Args:
        model: not packed yet, with an attention of transformers' own.
        ids: (1, T) token ids.
    """
    errors: dict[int, float] = {}

    def measure(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight: Tensor = layer.weight if type(layer) is nn.Linear else layer.weight.T  # type: ignore[assignment]
        x, w = inputs[0].float(), weight.float()
        change = _rounded(x) @ _rounded(w).T - x @ w.T
        error = float(change.norm() / output.float().norm().clamp_min(1e-12))
        errors[id(layer)] = max(error, errors.get(id(layer), 0.0))

    hooks = [layer.register_forward_hook(measure) for layer in model.modules() if type(layer) in PACKED]
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()
    return errors, logits


def compare(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Share of rows, (T, V) each, with the same largest logit; mean KL divergence of ``after`` from ``before``."""
    same = float((before.argmax(-1) == after.argmax(-1)).double().mean())
    own, other = before.log_softmax(-1), after.float().log_softmax(-1)
    return same, float((own.exp() * (own - other)).sum(-1).mean())
