"""What retaining heads learn: how strongly the rows of an answer look at each token of its prompt.

Huang et al. 2024, arXiv 2410.01805, section 3.2: of each KV head the largest attention logit of a token, over the
queries of its group and over the rows of the answer. Queries and keys are taken where a model hands them to its
attention: after norms and rotary embedding. No matrix of all rows by all tokens is ever made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from sakiyomi.cache.layout import LayerShape
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.attention import op

NAME = "sakiyomi_observed"
ROWS = 512  # of queries at a time
COLUMNS = 2048  # of keys at a time

Observe = Callable[[int, Tensor, Tensor, float, float, int], None]
"""Called for the attention of every layer with: layer, queries (heads, T, dim), keys (kv_heads, T, dim), scaling, soft
cap or 0, sliding window or 0."""

Attend = Callable[[int, Tensor, Tensor, Tensor, float, float, int], Tensor]
"""Computes a layer's attention: layer, queries (1, heads, T, dim), keys and values (1, kv_heads, T, dim), scaling, soft
cap or 0, sliding window or 0, to (1, heads, T, dim)."""

_attending: Attend | None = None


def attention_logits(queries: Tensor, keys: Tensor, scaling: float, softcap: float) -> Tensor:
    """(kv_heads, group, rows, columns) float32, as the softmax reads them."""
    kv_heads, group = keys.shape[0], queries.shape[0] // keys.shape[0]
    rows = queries.reshape(kv_heads, group * queries.shape[1], -1)
    found = (rows @ keys.mT).float().mul_(scaling)
    if softcap:
        found = softcap * torch.tanh(found / softcap)
    return found.view(kv_heads, group, queries.shape[1], keys.shape[1])


def _masked(found: Tensor, begin: int, row: int, window: int, *, causal: bool = False) -> Tensor:
    """Logits (..., rows, columns), -inf where a row does not see a column; changed in place.

    Args:
        found: logits.
        begin: position of the first column.
        row: position of the first row.
        window: tokens that a row sees, itself included; 0: all.
        causal: rows do not see later columns.
    """
    rows, columns = (
        torch.arange(at, at + n, device=found.device) for at, n in zip((row, begin), found.shape[-2:], strict=True)
    )
    if causal:
        found.masked_fill_(columns > rows[:, None], -torch.inf)
    return found.masked_fill_(columns <= rows[:, None] - window, -torch.inf) if window else found


def _maxima(
    queries: Tensor, keys: Tensor, first: int, totals: Sequence[Tensor], scaling: float, softcap: float, window: int
) -> Tensor:
    """Running maxima over blocks of rows and of tokens, (kv_heads, tokens) float32.

    Args:
        queries: (heads, rows, dim), the first at position `first`.
        keys: (kv_heads, tokens, dim).
        first: see there.
        totals: of each block of rows what is taken from its logits, (kv_heads, group, rows); empty: nothing.
        scaling, softcap, window: as in `largest_logits`.
    """
    blocks = []
    for begin, some in zip(range(0, keys.shape[1], COLUMNS), keys.split(COLUMNS, 1), strict=True):
        best = some.new_full(some.shape[:2], -torch.inf, dtype=torch.float32)
        for i, rows in enumerate(queries.split(ROWS, 1)):
            found = _masked(attention_logits(rows, some, scaling, softcap), begin, first + i * ROWS, window)
            torch.maximum(best, (found - totals[i][..., None] if totals else found).amax((1, 2)), out=best)
        blocks.append(best)
    return torch.cat(blocks, 1)


def largest_logits(
    queries: Tensor, keys: Tensor, scaling: float, softcap: float = 0.0, *, window: int = 0, first: int | None = None
) -> Tensor:
    """The recipe's label: running maxima over blocks of rows and of tokens.

    Args:
        queries: (heads, rows, dim) of the answer.
        keys: (kv_heads, tokens, dim) of the prompt.
        scaling: of the logits.
        softcap: largest absolute value of a logit; 0: none.
        window: tokens that a row sees, itself included; 0: all.
        first: position of the first row; None: after the tokens.

    Returns:
        (kv_heads, tokens) float32; -inf where no row's window includes the token.
    """
    return _maxima(queries, keys, keys.shape[1] if first is None else first, (), scaling, softcap, window)


def largest_chances(
    queries: Tensor, keys: Tensor, tokens: int, scaling: float, softcap: float = 0.0, *, window: int = 0
) -> Tensor:
    """The logarithm of the largest attention that a token gets from a row of the answer.

    A logit has a meaning only relative to the other logits of its row: the softmax's denominator covers all tokens that
    the row sees. A first pass over blocks of tokens computes it, a second one takes the maxima.

    Args:
        queries: (heads, rows, dim) of the last rows of the text.
        keys: (kv_heads, T, dim) of the whole text.
        tokens: of these belong to the prompt.
        scaling, softcap, window: as in `largest_logits`.

    Returns:
        (kv_heads, tokens) float32, at most 0; -inf where no row's window includes the token.
    """
    first, totals = keys.shape[1] - queries.shape[1], []
    for i, rows in enumerate(queries.split(ROWS, 1)):
        total = rows.new_full((), -torch.inf, dtype=torch.float32)
        for begin, some in zip(range(0, keys.shape[1], COLUMNS), keys.split(COLUMNS, 1), strict=True):
            found = attention_logits(rows, some, scaling, softcap)
            part = _masked(found, begin, first + i * ROWS, window, causal=True).logsumexp(3)
            total = torch.logaddexp(total, part)
        totals.append(total)
    return _maxima(queries, keys[:, :tokens], first, totals, scaling, softcap, window)


# ---------------------------------------------------------------- attention that is observed


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layer, scale, softcap, window = op.call_arguments(module, query, attention_mask, scaling, kwargs)
    if kwargs.get("s_aux") is not None:
        raise UnsupportedError(
            f"attention of {type(module).__name__} has sinks: nothing is trained on it here; choose another target"
        )
    assert _attending is not None
    return _attending(layer, query, key, value, scale, softcap, window).transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int) -> Tensor:
    """Attention of one text."""
    if softcap or 0 < window < query.shape[2]:
        return _by_rows(query, key, value, scale, softcap, window)
    group = query.shape[1] // key.shape[1]  # repeated: with enable_gqa some devices fall back to the whole matrix
    keys, values = (each.repeat_interleave(group, 1) if group > 1 else each for each in (key, value))
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)


def _by_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int) -> Tensor:
    """Attention with a soft cap or a sliding window, (1, heads, T, dim), a block of rows at a time."""
    parts = []
    for start in range(0, query.shape[2], ROWS):
        rows = query[0, :, start : start + ROWS]
        end = start + rows.shape[1]
        begin = max(0, start - window + 1) if window else 0
        found = attention_logits(rows, key[0, :, begin:end], scale, softcap)
        chances = _masked(found, begin, start, window, causal=True).softmax(3).to(value.dtype)
        kv_heads, group = chances.shape[:2]
        out = chances.flatten(1, 2) @ value[0, :, begin:end]
        parts.append(out.view(kv_heads * group, rows.shape[1], -1))
    return torch.cat(parts, 1)[None]


@functools.cache
def _register() -> None:
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


@contextmanager
def attention_by(model: Any, attend: Attend) -> Iterator[None]:
    """Around passes over single texts, (1, T) ids without padding: their attention is computed so.

    Args:
        model: a causal LM; its attention is as it was before afterwards.
        attend: computes it.

    Raises:
        UnsupportedError: the class keeps its own attention.
    """
    global _attending
    _register()
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise _own(model) from error
    _attending = attend
    try:
        yield
    finally:
        _attending = None
        model.set_attn_implementation(before)


@contextmanager
def attention_observed(model: Any, observe: Observe) -> Iterator[None]:
    """Around the same passes: computes the model's usual attention, and reports it to `observe`.

    Raises:
        UnsupportedError: see `attention_by`.
    """

    def attend(
        layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int
    ) -> Tensor:
        out = _causal(query, key, value, scale, softcap, window)
        observe(layer, query[0], key[0], scale, softcap, window)
        return out

    with attention_by(model, attend):
        yield


@torch.no_grad()
def layer_shapes(model: Any) -> list[LayerShape]:
    """Heads and sizes of each layer, from a pass over two tokens, which shows that every layer's attention is ours.

    Raises:
        UnsupportedError: it is not.
    """
    before = model.config._attn_implementation
    ids = torch.tensor([[1, 2]], device=model.device)
    layers = int(model.config.get_text_config().num_hidden_layers)
    try:
        found = op.layer_shapes(model, lambda: model(input_ids=ids, use_cache=False), layers)
    finally:
        model.set_attn_implementation(before)
    if found is None:
        raise _own(model)
    return found


def kv_heads_of(model: Any) -> tuple[int, ...]:
    """KV heads of each layer, see `layer_shapes`."""
    return tuple(shape.heads for shape in layer_shapes(model))


def _own(model: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} keeps its own attention, whose queries cannot be seen: heads of it cannot be trained "
        "in this version"
    )
