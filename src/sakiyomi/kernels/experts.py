"""Mixtures of experts by the compiled kernels: rows are gathered by expert, and each row is summed by itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sakiyomi.core.hooks import unchanged
from sakiyomi.kernels.native import PackedExperts, PackedWeights, can_pack

_SETTINGS = {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed"}
"""Attributes of transformers' classes of experts, see its ``use_experts_implementation``."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module is one of transformers' stacks of experts."""
    return vars(module).keys() >= _SETTINGS


def expert_weights(module: Any) -> list[str]:
    """Names of a stack's weights: the first and the second projection."""
    return ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]


def pack_experts(
    model: nn.Module, table: PackedWeights, *, free: bool = False, bits: Mapping[int, int] | None = None
) -> bool:
    """Put the weights of all experts into the kernels' tables; whether there are experts, and all were packed.

    Args:
        model: changed in place.
        table: for the weights.
        free: the weights have no other user: they are freed when they are packed.
        bits: bits of the weights of each stack by its id; None: weights are not quantized.
    """
    kinds = [module for module in model.modules() if is_experts(module)]
    found: list[Any] = [module for module in kinds if _served(module)]
    for module in found:
        for name in expert_weights(module):
            weights: Any = getattr(module, name)
            stack = weights.detach().transpose(1, 2) if module.is_transposed else weights.detach()
            biases = getattr(module, f"{name}_bias").detach() if module.has_bias else None
            packed = table.add_experts(stack, biases, bits=(bits or {}).get(id(weights), 16))
            delattr(module, name)  # a module may not replace a parameter
            setattr(module, name, packed)
            if free:
                weights.data = weights.new_empty(0)
    serve_experts(model)
    return bool(kinds) and len(found) == len(kinds)


def serve_experts(model: nn.Module) -> None:
    """Have the stacks whose weights are packed call the kernels."""
    for module in model.modules():
        if is_experts(module) and isinstance(getattr(module, "down_proj", None), PackedExperts):
            module.forward = functools.partial(_experts, module)


def expert_bytes(model: nn.Module) -> int:
    """Bytes of the weights that ``pack_experts`` would pack."""
    found = filter(_served, model.modules())
    return sum(weight.nbytes for module in found for weight in module.parameters(recurse=False) if weight.ndim == 3)


def chosen_rows(module: Any, rows: Tensor, top_k_index: Tensor) -> list[tuple[str, int, Tensor, Tensor]]:
    """The products of a stack for some rows, expert by expert.

    Args:
        module: the stack, not packed.
        rows: (N, hidden).
        top_k_index: (N, K), the experts of each.

    Returns:
        For each weight and each chosen expert: name of the weight, number of the expert, its weight (out, in), and its
        rows (n, in).
    """
    found = []
    for expert in top_k_index.unique().tolist():
        given = rows[(top_k_index == expert).any(1)]
        for name in expert_weights(module):
            weight = getattr(module, name)[expert]
            weight = weight.T if module.is_transposed else weight
            found.append((name, expert, weight, given))
            given = given @ weight.T
            if module.has_bias:
                given = given + getattr(module, f"{name}_bias")[expert]
            if name != "down_proj":
                given = module._apply_gate(given) if module.has_gate else module.act_fn(given)
    return found


def _served(module: Any) -> bool:
    """Whether the kernels can compute the experts of a module."""
    if not is_experts(module) or not unchanged(module) or module.has_post_expert_norm:
        return False
    for weight in (getattr(module, name, None) for name in expert_weights(module)):
        if type(weight) is not nn.Parameter or weight.ndim != 3 or weight.device.type != "cpu":
            return False
        out, inner = weight.shape[1:][:: -1 if module.is_transposed else 1]
        if not can_pack((out, inner), weight.dtype):
            return False
    return True


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows (N, hidden), the K experts of each and their weights, (N, K), to (N, hidden)."""
    first, second = (getattr(module, name) for name in expert_weights(module))
    inner = first(hidden_states, top_k_index)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    rows = second(inner, top_k_index).view(*top_k_index.shape, -1)
    return (rows * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)  # type: ignore[no-any-return]
