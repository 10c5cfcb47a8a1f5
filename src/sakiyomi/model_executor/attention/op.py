"""The attention functions that transformers' models are switched to.

A backend's operator is registered with transformers under its name when the backend is first chosen; `sakiyomi_probe`
computes ordinary causal attention and notes what each layer asked for. Masks are ours, so the mask functions return
None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from sakiyomi.cache.layout import LayerShape
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.attention import observe  # noqa: F401  (their operators are registered)
from sakiyomi.model_executor.attention import torch as dense
from sakiyomi.model_executor.attention.registry import AttentionBackend

# Arguments that change the result and that our operators do not know; a layer that passes one cannot run here.
UNKNOWN = ("s_aux", "position_bias", "alibi", "head_mask", "relative_position_bias")


Note = Callable[[int, Tensor, float], Tensor]
"""What is noted of a pass's rows for the cache's policy: from layer, queries (1, heads, rows, dim) after their rotation
and the factor of scores to (rows, width)."""
NOTE = "sakiyomi_note"


@dataclass(slots=True)
class _Probe:
    shapes: dict[int, LayerShape]
    calls: int = 0


_probe: _Probe | None = None


def call_arguments(
    module: nn.Module, query: Tensor, mask: Tensor | None, scaling: float | None, kwargs: dict[str, Any]
) -> tuple[int, float, float, int]:
    """Layer, scaling, soft cap and sliding window (0: none) of one call of attention.

    Raises:
        UnsupportedError: it has a mask of its own, or an argument that changes the result and is not known here.
    """
    if mask is not None:  # the mask functions give None, so this one is the layer's own
        raise UnsupportedError(
            f"attention of {type(module).__name__} makes its own mask, which is not supported; "
            "use transformers for this model"
        )
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"attention of {type(module).__name__} uses {name}, which is not supported; "
                "use transformers for this model"
            )
    return (
        int(module.layer_idx),  # type: ignore[arg-type]
        float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        float(kwargs.get("softcap") or 0.0),
        int(kwargs.get("sliding_window") or 0),
    )


def _attention_of(backend: type[AttentionBackend]) -> Callable[..., tuple[Tensor, None]]:
    """The attention function, as transformers calls it, on a backend's operator."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layer, scale, softcap, window = call_arguments(module, query, attention_mask, scaling, kwargs)
        # What is recorded are decoding passes, which nothing takes over.
        apart = not torch.compiler.is_compiling() and dense.taken_over()
        attend = dense.TorchBackend.attend if apart else backend.attend
        out = attend(query, key, value, layer, scale, softcap, window)
        note: Note | None = getattr(module, NOTE, None)
        if note is not None:
            out = torch.ops.sakiyomi.observe(out, note(layer, query, scale), layer)
        return out, None

    return attention


def _probing(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layer, scale, _, window = call_arguments(module, query, attention_mask, scaling, kwargs)
    assert _probe is not None
    _probe.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.device, window)
    _probe.calls += 1
    out = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


CROSS: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "sakiyomi_probe": lambda q, layer, scaling: q.transpose(1, 2)
}
"""Cross-attention by the names of operators: (1, heads, rows, dim) to (1, rows, heads, dim)."""


@functools.cache
def register(backend: type[AttentionBackend]) -> None:
    """Make a backend's operator known to transformers, once a process."""
    _announce(backend.operator, _attention_of(backend))
    CROSS[backend.operator] = backend.cross


@functools.cache
def _register_probe() -> None:
    _announce("sakiyomi_probe", _probing)


def _announce(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    if name != "eager":  # a model's own
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


def layer_shapes(model: nn.Module, forward: Callable[[], object], layers: int) -> list[LayerShape] | None:
    """What each attention layer stores, learnt from one small pass; None where the model does not come to our operator.

    Some classes (falcon, mpt, bloom) accept another attention with a log line and keep their own, so the switch is
    not believed: the operator must have been called exactly once for every layer.

    Args:
        model: its attention is left switched to the probe.
        forward: runs the model on two tokens.
        layers: attention layers that the config announces.
    """
    global _probe
    _register_probe()
    _probe = _Probe({})
    try:
        try:
            model.set_attn_implementation("sakiyomi_probe")  # type: ignore[operator]
        except ValueError:  # the class says itself that it has only its own attention
            return None
        forward()
        if _probe.calls != layers or sorted(_probe.shapes) != list(range(layers)):
            return None
        return [_probe.shapes[i] for i in range(layers)]
    finally:
        _probe = None
