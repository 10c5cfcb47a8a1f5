"""Attention modules of Bloom, MPT and Falcon on the attention operator.

These classes compute attention in their modules' own forward. In our structural copy another forward replaces it: the
module's own projections, then the attention operator. Other classes with attention of their own read their texts one
by one through their own forward (``own_forward.py``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.layout import Alibi
from sakiyomi.model_executor.attention.op import eager

Attend = Callable[..., Tensor]
"""From module, queries, keys and values (1, heads, N, dim), factor of scores and ALiBi to (1, N, heads * dim)."""


def serve_own(model: Any) -> None:
    """Have the attention modules of these classes call the attention operator.

    Args:
        model: our structural copy; changed in place.
    """
    known = [module for module in model.modules() if type(module).__name__ in OWN]
    attend = functools.partial(_attend, model.config)
    for module in known:
        module.forward = functools.partial(OWN[type(module).__name__], module, attend)
    if known:  # transformers refuses to switch such a class
        model.config._any_mask = True  # MPT converts a mask before our operator ignores it
        model.set_attn_implementation = functools.partial(setattr, model.config, "_attn_implementation")


def _attend(
    config: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, alibi: Alibi | None = None
) -> Tensor:
    from transformers import AttentionInterface

    function = AttentionInterface().get(config._attn_implementation, eager)
    out: Tensor = function(module, q, k, v, None, scaling=scaling, own_alibi=alibi)[0]
    return out.flatten(2)


def _bloom(module: Any, attend: Attend, hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    alibi = Alibi(_slopes(module), coarse=hidden_states.dtype == torch.bfloat16)
    return module.dense(attend(module, q, k, v, module.inv_norm_factor, alibi)) + residual, None


def _mpt(module: Any, attend: Attend, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (part.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    alibi = _code(module).build_mpt_alibi_tensor(module.n_heads, 2)[:, 0]  # -slope and 0
    return module.out_proj(attend(module, q, k, v, module.softmax_scale, Alibi((-alibi[:, 0]).contiguous()))), None


def _falcon(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    alibi: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden_states)))
    if module.new_decoder_architecture:  # which repeats them for every query head
        group = module.num_heads // module.num_kv_heads
        k, v = k[:, ::group], v[:, ::group]
    added = None
    if alibi is None:
        assert position_embeddings is not None
        q, k = _code(module).apply_rotary_pos_emb(q, k, *position_embeddings)
    else:
        added = Alibi(_slopes(module), module.inv_norm_factor, coarse=True)
    return module.dense(attend(module, q, k, v, module.inv_norm_factor, added)), None


def _code(module: nn.Module) -> Any:
    """The module in which a class is written."""
    return sys.modules[type(module).__module__]


def _slopes(module: Any) -> Tensor:
    """The ALiBi slope of every head, as the class computes it: the bias of its second position."""
    made: Tensor = _code(module).build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)
    return made[:, 0, 1].contiguous()


OWN: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "FalconAttention": _falcon,
}
"""By class name: from module, operator and the arguments of the class's own forward to the results of that forward."""
