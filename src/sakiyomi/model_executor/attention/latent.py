"""Compressed keys and values (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1): the cache holds the latents themselves.

The cache keeps one vector per token that all heads share: its latent and the rotary part of its key. A head's keys and
values are a matrix times the latent. Here queries and outputs are multiplied with that matrix instead (section 2.1.2),
so that the latents act as a single head of keys and values. A product with a latent takes longer than one with a key
and a value, so passes over many rows of a prompt expand the latents first (``expand``). Transformers' classes expand
them in the method ``expand_kv``. In our structural copy that method returns the latents, and the attention functions
call ``prompt``, or ``queries`` and ``outputs``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.kernels.pack import is_linear

LATENT, VALUES = "sakiyomi_latent", "sakiyomi_values"
Expanded = Callable[[nn.Module, Tensor, Tensor, int, float, float, int], Tensor | None]
"""Attention with expanded keys: from a module, queries (1, H, N, plain + rotary), latents (1, 1, N, rank + rotary) and
the further arguments of ``AttentionBackend.attend`` to (1, N, H, value); None: expanding would be slower."""
_pass = threading.local()


def serve_latents(model: nn.Module) -> None:
    """Have a model's attention modules pass latents to the attention function, if every module with latents can.

    Args:
        model: our structural copy; changed in place.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    # Offloaded and quantized weights and adapters can only be multiplied by their own forward.
    if not all(is_linear(m.kv_b_proj) and not hasattr(m.kv_b_proj, "_hf_hook") for m in modules):
        return
    if any(m.kv_b_proj.bias is not None or type(m.kv_b_proj.weight) is not nn.Parameter for m in modules):
        return
    for module in modules:
        setattr(module, LATENT, True)
        module.expand_kv = functools.partial(_keep, module)


def is_latent(module: nn.Module) -> bool:
    """Whether an attention module passes latents."""
    return hasattr(module, LATENT)


def queries(module: Any, q: Tensor) -> Tensor:
    """Queries for latents: (1, H, N, plain + rotary) to (1, H, N, rank + rotary)."""
    plain, turned = q.split([module.qk_nope_head_dim, q.shape[-1] - module.qk_nope_head_dim], -1)
    return torch.cat([plain @ _up(module, q)[:, : module.qk_nope_head_dim], turned], -1)


def outputs(module: Any, found: Tensor) -> Tensor:
    """Sums of latents to outputs: (1, N, H, rank + rotary) to (1, N, H, value)."""
    up = getattr(module, VALUES, None)
    if up is None:  # contiguous: a product with a slice of each head's rows takes six times as long
        up = _up(module, found.transpose(1, 2))[:, module.qk_nope_head_dim :].contiguous()
        setattr(module, VALUES, up)
    return (found[..., : up.shape[2]].transpose(1, 2) @ up.transpose(1, 2)).transpose(1, 2)


def prompts_by(expanded: Expanded | None) -> None:
    """Set the function that computes attention in this thread's next pass; None: the pass has no prompt."""
    _pass.expanded = expanded


def prompt(
    module: nn.Module, q: Tensor, latents: Tensor, layer: int, scaling: float, softcap: float, window: int
) -> Tensor | None:
    """The result of the function that ``prompts_by`` has set, for a layer's rows; None: none is set, or it declines."""
    expanded: Expanded | None = getattr(_pass, "expanded", None)
    return None if expanded is None else expanded(module, q, latents, layer, scaling, softcap, window)


def expanding_is_faster(module: Any, pairs: float, columns: int) -> bool:
    """Whether attention with expanded keys needs fewer multiplications.

    Args:
        module: the attention module.
        pairs: number of pairs of a row and a column that it sees.
        columns: number of columns to expand.
    """
    rank, rotary = module.kv_b_proj.in_features, module.qk_rope_head_dim
    both = module.qk_nope_head_dim + module.v_head_dim
    return bool(pairs * (2 * (rank + rotary) - both - rotary) > columns * rank * both)


def expand(module: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Latents (n, rank + rotary) to the keys (H, n, plain + rotary) and values (H, n, value) of all heads."""
    rank, plain = module.kv_b_proj.in_features, module.qk_nope_head_dim
    both = nn.functional.linear(latents[:, :rank], module.kv_b_proj.weight)
    both = both.unflatten(1, (-1, plain + module.v_head_dim)).transpose(0, 1)
    turned = latents[:, rank:].expand(len(both), -1, -1)
    return torch.cat([both[..., :plain], turned], -1), both[..., plain:]


def _keep(module: Any, latents: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces ``expand_kv``: (1, 1, N, rank) and (1, 1, N, rotary) to keys, which are also the values."""
    keys = torch.cat([latents, turned], -1)
    return keys, keys


def _up(module: Any, heads: Tensor) -> Tensor:
    """The matrix from latents to keys without position and values, (H, plain + value, rank)."""
    weight: Tensor = module.kv_b_proj.weight.view(heads.shape[1], -1, module.kv_b_proj.in_features)
    return weight
