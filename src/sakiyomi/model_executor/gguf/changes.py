"""How numbers of a GGUF file differ from those of the model: what llama.cpp's converter does, undone.

A change that only moves whole rows also applies to blocks as they are stored (bytes, row by row).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Change:
    """A tensor of the model from one or more of the file.

    Attributes:
        undo: makes it of the file's tensors and the model's configuration.
        redo: makes the file's tensors of it.
        rows: whether ``undo`` only moves rows, and so takes bytes of blocks, too.
        turned: the model has matrices as (in, out). ``undo`` gives, and ``redo`` takes, (out, in).
    """

    undo: Callable[[Sequence[Tensor], Any], Tensor]
    redo: Callable[[Tensor, Any], Sequence[Tensor]]
    rows: bool = False
    turned: bool = False

    def to_file(self, own: Tensor, config: Any) -> Sequence[Tensor]:
        """The file's tensors of one of the model."""
        return self.redo(own.mT if self.turned else own, config)


def _one(undo: Callable[[Tensor, Any], Tensor], redo: Callable[[Tensor, Any], Tensor], *, rows: bool = False) -> Change:
    return Change(lambda given, config: undo(given[0], config), lambda own, config: (redo(own, config),), rows)


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from (pair, half) to (half, pair): rotary positions turn halves here, neighbours there."""
    turned: Tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
    return turned


def _neighbours(tensor: Tensor, heads: int) -> Tensor:
    turned: Tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    return turned


SAME = _one(lambda t, c: t, lambda t, c: t, rows=True)
NUMBERS = _one(lambda t, c: t, lambda t, c: t)
"""Weights that others than their layer read, and which so are never kept in blocks."""
QUERIES = _one(
    lambda t, c: _halves(t, c.num_attention_heads), lambda t, c: _neighbours(t, c.num_attention_heads), rows=True
)
KEYS = _one(
    lambda t, c: _halves(t, c.num_key_value_heads), lambda t, c: _neighbours(t, c.num_key_value_heads), rows=True
)
PLUS_ONE = _one(lambda t, c: t - 1, lambda t, c: t + 1)
"""Norms that multiply by 1 + weight, which the file adds up."""
DECAY = _one(lambda t, c: torch.log(-t), lambda t, c: -torch.exp(t))
"""The logarithm of a decay, which the file holds as the negative decay."""
SQUEEZED = _one(lambda t, c: t.unsqueeze(1), lambda t, c: t.squeeze(1), rows=True)
"""Weights of a convolution over time, (channels, 1, width)."""
ROW = _one(lambda t, c: t.reshape(1, -1), lambda t, c: t.reshape(-1), rows=True)
TURNED = replace(SAME, turned=True)
"""Weights (in, out), as GPT-2 has them."""
EXPERTS = Change(
    lambda given, config: torch.cat(list(given), dim=-2),
    lambda own, config: own.chunk(2, dim=-2),
    rows=True,
)
"""Gates and inputs of all experts, (experts, 2 x width, in)."""


def joined(
    change: Callable[[Any], Callable[[Tensor], Tensor]], back: Callable[[Any], Callable[[Tensor], Tensor]]
) -> Change:
    """A change of rows that depends on the configuration: ``change(config)(tensor)``."""
    return _one(lambda t, c: change(c)(t), lambda t, c: back(c)(t), rows=True)


# ---------------------------------------------------------------- queries, keys and values in one tensor


def _grouped(config: Any) -> Callable[[Tensor], Tensor]:
    """Falcon: from all queries, all keys, all values to groups of queries with their key and value."""

    def change(tensor: Tensor) -> Tensor:
        heads, groups = config.num_attention_heads, _groups(config)
        width = tensor.shape[0] // (heads + 2 * groups)
        parts = tensor.unflatten(0, (-1, width)).split([heads, groups, groups])
        queries, keys, values = (part.unflatten(0, (groups, -1)) for part in parts)
        return torch.cat([queries, keys, values], dim=1).reshape(tensor.shape)

    return change


def _ungrouped(config: Any) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        heads, groups = config.num_attention_heads, _groups(config)
        width = tensor.shape[0] // (heads + 2 * groups)
        held = tensor.unflatten(0, (groups, heads // groups + 2, width))
        parts = (held[:, :-2], held[:, -2:-1], held[:, -1:])
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])

    return change


def _groups(config: Any) -> int:
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    return 1 if getattr(config, "multi_query", False) else int(config.num_attention_heads)


GROUPED = joined(_grouped, _ungrouped)


# ---------------------------------------------------------------- gpt-oss


INTERLEAVED = Change(
    lambda given, config: torch.stack(list(given), dim=-2).flatten(-3, -2),
    lambda own, config: (own[..., ::2, :], own[..., 1::2, :]),
    rows=True,
    turned=True,
)
"""Gates and inputs of experts, row by row in turn, (experts, in, 2 x width)."""
INTERLEAVED_BIAS = Change(
    lambda given, config: torch.stack(list(given), dim=-1).flatten(-2),
    lambda own, config: (own[..., ::2], own[..., 1::2]),
)


# ---------------------------------------------------------------- Qwen 3.5: heads of values


def _value_heads(tensor: Tensor, config: Any, width: int, *, back: bool) -> Tensor:
    """Heads of values from "by place in their group" to "by group" (of a key's head), or back; (heads x width, ...)."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = (keys, values // keys, width) if back else (values // keys, keys, width)
    turned: Tensor = tensor.unflatten(0, sizes).transpose(0, 1).reshape(tensor.shape)
    return turned


def _values(width_of: Callable[[Any], int], skipped: Callable[[Any], int] = lambda config: 0) -> Change:
    def turned(tensor: Tensor, config: Any, *, back: bool) -> Tensor:
        first = skipped(config)
        moved = _value_heads(tensor[first:], config, width_of(config), back=back)
        return torch.cat([tensor[:first], moved]) if first else moved

    return _one(lambda t, c: turned(t, c, back=False), lambda t, c: turned(t, c, back=True), rows=True)


def _value_width(config: Any) -> int:
    return int(config.linear_value_head_dim)


def _key_rows(config: Any) -> int:
    return 2 * int(config.linear_key_head_dim) * int(config.linear_num_key_heads)


VALUE_HEADS = _values(lambda config: 1)
VALUE_ROWS = _values(_value_width)
QKV_ROWS = _values(_value_width, _key_rows)
VALUE_COLUMNS = _one(
    lambda t, c: _value_heads(t.T, c, _value_width(c), back=False).T,
    lambda t, c: _value_heads(t.T, c, _value_width(c), back=True).T,
)
VALUE_DECAY = _one(
    lambda t, c: VALUE_HEADS.undo([torch.log(-t)], c), lambda t, c: -torch.exp(VALUE_HEADS.redo(t, c)[0])
)
QKV_CONVOLUTION = _one(
    lambda t, c: QKV_ROWS.undo([t], c).unsqueeze(1), lambda t, c: QKV_ROWS.redo(t.squeeze(1), c)[0], rows=True
)


# ---------------------------------------------------------------- latent attention (DeepSeek)


def _keys_and_values(given: Sequence[Tensor], config: Any) -> Tensor:
    """Weights from latents to keys (heads, latent, width) and values (heads, width, latent), as one linear layer."""
    keys, values = given
    return torch.cat([keys.mT, values], dim=1).flatten(0, 1)


def _apart(own: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    held = own.unflatten(0, (config.num_attention_heads, -1))
    keys, values = held.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return keys.mT, values


LATENT = Change(_keys_and_values, _apart)
