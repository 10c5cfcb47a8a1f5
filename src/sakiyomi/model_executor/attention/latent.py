"""Compressed keys and values (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1): the cache holds the latents themselves.

Of a token is kept what all heads share, its latent and the rotary part of its key. A head's keys and values are a
matrix times the latent; here queries and outputs are multiplied with that matrix instead (section 2.1.2), so that the
latents are one head of keys, and values too. A product with a latent is longer than one with a key and a value: prompts
of many rows have those of their pass expanded (``expand``). Transformers' classes expand them in a method of one name;
in our structural copy that method gives the latents, and the attention functions call ``prompt``, or ``queries`` and
``outputs``.
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
"""Attention with expanded keys: of a module, queries (1, H, N, plain + rotary), latents (1, 1, N, rank + rotary) and
what ``AttentionBackend.attend`` is told to (1, N, H, value); None: expanding them would take longer."""
_pass = threading.local()


def serve_latents(model: nn.Module) -> None:
    """Have a model's attention modules give latents to the attention function, where all that have latents can.

    Args:
        model: our structural copy; changed in place.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    # Weights that come and go by hooks, quantized ones and adapters are multiplied by their own forwards alone.
    if not all(is_linear(m.kv_b_proj) and not hasattr(m.kv_b_proj, "_hf_hook") for m in modules):
        return
    if any(m.kv_b_proj.bias is not None or type(m.kv_b_proj.weight) is not nn.Parameter for m in modules):
        return
    for module in modules:
        setattr(module, LATENT, True)
        module.expand_kv = functools.partial(_keep, module)


def is_latent(module: nn.Module) -> bool:
    """Whether an attention module gives latents."""
    return hasattr(module, LATENT)


def queries(module: Any, q: Tensor) -> Tensor:
    """Queries for latents: (1, H, N, plain + rotary) to (1, H, N, rank + rotary)."""
    plain, turned = q.split([module.qk_nope_head_dim, q.shape[-1] - module.qk_nope_head_dim], -1)
    return torch.cat([plain @ _up(module, q)[:, : module.qk_nope_head_dim], turned], -1)


def outputs(module: Any, found: Tensor) -> Tensor:
    """Sums of latents to outputs: (1, N, H, rank + rotary) to (1, N, H, value)."""
    up = getattr(module, VALUES, None)
    if up is None:  # laid out by itself: a product with a part of each head's rows takes six times as long
        up = _up(module, found.transpose(1, 2))[:, module.qk_nope_head_dim :].contiguous()
        setattr(module, VALUES, up)
    return (found[..., : up.shape[2]].transpose(1, 2) @ up.transpose(1, 2)).transpose(1, 2)


def prompts_by(expanded: Expanded | None) -> None:
    """Have this thread's next pass, one with a prompt, computed by this where that is faster; None: it has none."""
    _pass.expanded = expanded


def prompt(
    module: nn.Module, q: Tensor, latents: Tensor, layer: int, scaling: float, softcap: float, window: int
) -> Tensor | None:
    """The result of the function given to ``prompts_by`` for a layer's rows; None: there is none."""
    expanded: Expanded | None = getattr(_pass, "expanded", None)
    return None if expanded is None else expanded(module, q, latents, layer, scaling, softcap, window)


def pays(module: Any, pairs: float, columns: int) -> bool:
    """Whether fewer numbers are multiplied with expanded keys.

    Args:
        module: of the attention.
        pairs: of rows and the columns that they see.
        columns: that are to be expanded.
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
    """Replaces ``expand_kv``: (1, 1, N, rank) and (1, 1, N, rotary) to keys, which are values too."""
    keys = torch.cat([latents, turned], -1)
    return keys, keys


def _up(module: Any, heads: Tensor) -> Tensor:
    """What makes keys without position, and values, of latents: (H, plain + value, rank)."""
    weight: Tensor = module.kv_b_proj.weight.view(heads.shape[1], -1, module.kv_b_proj.in_features)
    return weight
