"""The attention functions that transformers' models are switched to.

A backend's operator is registered with transformers under its name when the backend is first chosen; `sakiyomi_probe`
computes ordinary causal attention and notes what each layer asked for. Masks are ours, so the mask functions return
None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sakiyomi.cache.layout import LayerShape
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.attention import observe  # noqa: F401  (their operators are registered)
from sakiyomi.model_executor.attention import torch as dense

# Arguments that change the result and that our operators do not know; a layer that passes one cannot run here.
UNKNOWN = ("s_aux", "position_bias", "alibi", "head_mask", "relative_position_bias")


Note = Callable[[int, Tensor, float], Tensor]
"""What is noted of a pass's rows for the cache's policy: from layer, queries (1, heads, rows, dim) after their rotation
and the factor of scores to (rows, width)."""
NOTE = "sakiyomi_note"
PROBE = "sakiyomi_probe"
Attend = Callable[[Tensor, Tensor, Tensor, int, float, float, int], Tensor]
"""See ``AttentionBackend.attend``."""


_probed: list[LayerShape] = []
"""What the layers of a model that is probed have asked for, in the order of their calls."""
_callers: list[nn.Module] = []
"""Those layers."""


def call_arguments(
    module: nn.Module, query: Tensor, mask: Tensor | None, scaling: float | None, kwargs: dict[str, Any]
) -> tuple[int, float, float, int]:
    """Layer, scaling, soft cap and sliding window (0: none) of one call of attention.

    Raises:
        UnsupportedError: it has a mask of its own, or an argument that changes the result and is not known here.
    """
    # The mask functions give None, so a mask is the layer's own.
    asked = "makes its own mask" if mask is not None else ""
    asked = asked or next((f"uses {name}" for name in UNKNOWN if kwargs.get(name) is not None), "")
    if asked:
        raise UnsupportedError(
            f"attention of {type(module).__name__} {asked}, which is not supported; use transformers for this model"
        )
    return (
        int(module.layer_idx),  # type: ignore[arg-type]
        float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        float(kwargs.get("softcap") or 0.0),
        int(kwargs.get("sliding_window") or 0),
    )


def _attention_of(own: Attend) -> Callable[..., tuple[Tensor, None]]:
    """The attention function, as transformers calls it, on an operator."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if own is _probe:
            _callers.append(module)
            if getattr(module, "layer_idx", None) is None:  # a block that several layers share
                module.layer_idx = len(_callers) - 1  # type: ignore[assignment]
        layer, scale, softcap, window = call_arguments(module, query, attention_mask, scaling, kwargs)
        # What is recorded are decoding passes, which nothing takes over.
        apart = not torch.compiler.is_compiling() and dense.taken_over()
        attend = dense.TorchBackend.attend if apart else own
        out = attend(query, key, value, layer, scale, softcap, window)
        note: Note | None = getattr(module, NOTE, None)
        if note is not None:
            out = torch.ops.sakiyomi.observe(out, note(layer, query, scale), layer)
        return out, None

    return attention


def _probe(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int) -> Tensor:
    _probed.append(LayerShape(k.shape[1], k.shape[3], v.shape[3], k.device, window))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def _probe_cross(q: Tensor, layer: int, scaling: float) -> Tensor:
    return q.transpose(1, 2)


CROSS: dict[str, Callable[[Tensor, int, float], Tensor]] = {}
"""Cross-attention by the names of operators: (1, heads, rows, dim) to (1, rows, heads, dim)."""


@functools.cache
def register(name: str, attend: Attend, cross: Callable[[Tensor, int, float], Tensor]) -> None:
    """Make an operator known to transformers, once a process; see ``AttentionBackend`` for what it computes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if name != "eager":  # a model's own
        AttentionInterface.register(name, _attention_of(attend))
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    CROSS[name] = cross


def layer_shapes(model: nn.Module, forward: Callable[[], object], layers: int | None) -> list[LayerShape] | None:
    """What each attention layer stores, learnt from one small pass; None where the model does not come to our operator.

    Some classes (falcon, mpt, bloom) accept another attention with a log line and keep their own, so the switch is
    not believed: the operator must have been called exactly once for every layer.

    Args:
        model: its attention is left switched to the probe.
        forward: runs the model on two tokens.
        layers: attention layers that the config announces; None: other layers are among them, and those with attention
            are numbered anew without them.
    """
    register(PROBE, _probe, _probe_cross)
    dense.take_over(None)  # as the pass before may have been
    _probed.clear()
    _callers.clear()
    try:
        model.set_attn_implementation(PROBE)  # type: ignore[operator]
    except ValueError:  # the class says itself that it has only its own attention
        return None
    forward()
    callers: list[Any] = list(_callers)
    shapes = list(_probed)
    _callers.clear()
    if layers is None:
        for number, module in enumerate(callers):
            module.layer_idx = number
        return shapes if len(set(map(id, callers))) == len(callers) else None
    found = {int(module.layer_idx): shape for module, shape in zip(callers, shapes, strict=True)}
    complete = len(shapes) == layers and sorted(found) == list(range(layers))
    return [found[layer] for layer in range(layers)] if complete else None
