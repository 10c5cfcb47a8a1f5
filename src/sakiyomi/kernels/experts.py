"""Mixtures of experts by the compiled kernels: rows are gathered by expert, and each of them is summed alone."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sakiyomi.kernels.native import PackedWeights, can_pack

__all__ = ["expert_bytes", "pack_experts"]


class _Experts(Protocol):
    """What transformers' classes of experts have in common, see its ``use_experts_implementation``."""

    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool


def pack_experts(model: nn.Module, table: PackedWeights, *, free: bool = False) -> bool:
    """Put the weights of all experts into the kernels' tables; whether there are experts, and all could be.

    Args:
        model: changed in place.
        table: for the weights.
        free: the weights are not used by anybody else: they are freed when they are packed.
    """
    kinds = [module for module in model.modules() if _Experts.__annotations__.keys() <= vars(module).keys()]
    found: list[Any] = [module for module in kinds if _served(module)]
    for module in found:
        names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
        places = []
        for name in names:
            weights: Any = getattr(module, name)
            biases: Any = getattr(module, f"{name}_bias", None)
            layers = [
                table.add_linear(weight.T if module.is_transposed else weight, biases[i] if module.has_bias else None)
                for i, weight in enumerate(weights.detach())
            ]
            places.append((layers[0].index, len(layers), layers[0].out_features))
            if free:
                weights.data = weights.new_empty(0)
        up, down = places
        module.forward = functools.partial(_experts, module, up, down)
    return bool(kinds) and len(found) == len(kinds)


def expert_bytes(model: nn.Module) -> int:
    """Bytes of what ``pack_experts`` would pack."""
    found = filter(_served, model.modules())
    return sum(weight.nbytes for module in found for weight in module.parameters(recurse=False) if weight.ndim == 3)


def _served(module: Any) -> bool:
    """Whether the kernels can compute a module's experts as it does."""
    if not _Experts.__annotations__.keys() <= vars(module).keys() or "forward" in vars(module):
        return False
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook") or module.has_post_expert_norm:
        return False
    weights = [getattr(module, name, None) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")]
    for weight in weights:
        if type(weight) is not nn.Parameter or weight.ndim != 3 or weight.device.type != "cpu":
            return False
        out, inner = weight.shape[1:][:: -1 if module.is_transposed else 1]
        if not can_pack((out, inner), weight.dtype):
            return False
    return True


def _experts(
    module: Any,
    up: tuple[int, int, int],
    down: tuple[int, int, int],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Rows (N, hidden), the K experts of each and their weights, (N, K), to (N, hidden)."""
    compute = torch.ops.sakiyomi_cpu.experts
    inner = compute(hidden_states, top_k_index, *up)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    rows = compute(inner, top_k_index, *down).view(*top_k_index.shape, -1)
    return (rows * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)  # type: ignore[no-any-return]
