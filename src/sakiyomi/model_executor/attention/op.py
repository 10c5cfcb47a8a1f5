"""The attention functions that transformers' models are switched to.

A backend's operator is registered with transformers under its name when the backend is first chosen. Its mask function
returns None, since the backends make their own masks. `sakiyomi_probe` computes what the model's class computes, with
the class's masks, and notes the arguments of each layer. Windows are read from the mask functions (``masks.py``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.layout import Alibi, LayerShape
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.attention import latent
from sakiyomi.model_executor.attention import torch as dense
from sakiyomi.model_executor.attention.masks import window_of

# Arguments that change the result and that our operators do not take; a layer that passes one cannot run here.
UNKNOWN = ("position_bias", "alibi", "head_mask", "relative_position_bias")


Note = Callable[[int, Tensor, float], Tensor]
"""Makes what the cache's policy observes of a pass's rows: from layer, queries (1, heads, rows, dim) after the rotary
embedding and the scale of scores to (rows, width)."""
NOTE = "sakiyomi_note"
WINDOW = "sakiyomi_window"
"""Attribute of an attention module: its window, see ``LayerShape.reach``."""
PROBE = "sakiyomi_probe"
Attend = Callable[[Tensor, Tensor, Tensor, int, float, float, int], Tensor]
"""See ``AttentionBackend.attend``."""


@dataclass
class _Noted:
    """What a pass that probes a model has noted.

    Attributes:
        callers, shapes: layers in the order of their calls, and the shape of each.
        pairs: their keys and values, kept alive so that an address identifies one of them.
        masks: masks of the pass by the address of their storage, and the window of each; None: of another kind.
    """

    callers: list[nn.Module] = field(default_factory=list)
    shapes: list[LayerShape] = field(default_factory=list)
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, int | None]] = field(default_factory=dict)


_noted = _Noted()


def call_arguments(
    module: nn.Module, query: Tensor, mask: Tensor | None, scaling: float | None, kwargs: dict[str, Any]
) -> tuple[int, float, float, int]:
    """Layer, scaling, soft cap and window (see ``LayerShape.reach``) of one call of attention.

    Raises:
        UnsupportedError: it has its own mask, or an argument that changes the result and is not supported.
    """
    _, window = (None, None) if mask is None else _noted.masks.get(mask.untyped_storage().data_ptr(), (None, None))
    # In passes of requests the mask functions give None.
    asked = "makes its own mask" if mask is not None and window is None else ""
    asked = asked or next((f"uses {name}" for name in UNKNOWN if kwargs.get(name) is not None), "")
    if asked:
        raise UnsupportedError(
            f"attention of {type(module).__name__} {asked}, which is not supported; use transformers for this model"
        )
    return (
        int(module.layer_idx),  # type: ignore[arg-type]
        _scaling(query, scaling),
        float(kwargs.get("softcap") or 0.0),
        window if window is not None else int(getattr(module, WINDOW, kwargs.get("sliding_window")) or 0),
    )


def set_windows(model: nn.Module, windows: Sequence[int]) -> None:
    """Give every attention layer its window, see ``LayerShape.reach``, in the place of what its calls say."""
    for module in model.modules():
        layer = vars(module).get("layer_idx")
        if isinstance(layer, int) and layer < len(windows):
            setattr(module, WINDOW, windows[layer])


def _attention_of(own: Attend) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that transformers calls, computed by an operator."""

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
        compressed = latent.is_latent(module)
        if compressed:
            if (found := latent.prompt(module, query, key, layer, scale, softcap, window)) is not None:
                return found, None
            query = latent.queries(module, query)
        attend = dense.TorchBackend.attend if dense.taken_over() else own
        out = attend(query, key, value, layer, scale, softcap, window)
        note: Note | None = getattr(module, NOTE, None)
        if note is not None:
            out = torch.ops.sakiyomi.observe(out, note(layer, query, scale), layer)
        return latent.outputs(module, out) if compressed else out, None

    return attention


def _noting(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Note the arguments of a layer, and compute attention as its class does."""
    _noted.callers.append(module)
    if getattr(module, "layer_idx", None) is None:  # a block that several layers share
        module.layer_idx = len(_noted.callers) - 1  # type: ignore[assignment]
    *_, window = call_arguments(module, query, attention_mask, scaling, kwargs)
    sinks = kwargs.get("s_aux")
    places = [(pair[0].data_ptr(), pair[0].shape, pair[1].data_ptr()) for pair in (*_noted.pairs, (key, value))]
    _noted.pairs.append((key, value))
    source = places.index(places[-1])
    _noted.shapes.append(
        LayerShape(
            key.shape[1],
            key.shape[3],
            value.shape[3],
            key.device,
            max(window, 0),
            max(-window, 0),
            None if sinks is None else sinks.detach().float().contiguous(),
            kwargs.get("own_alibi"),
            tied=key is value,
            source=source if source < len(_noted.shapes) else None,
        )
    )
    if attention_mask is None:
        attention_mask = _causal(query)
    scaling = _scaling(query, scaling)
    if latent.is_latent(module):
        found, _ = eager(module, latent.queries(module, query), key, value, attention_mask, scaling)
        return latent.outputs(module, found), None
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None) or eager
    out: tuple[Tensor, Any] = function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return out


def _scaling(query: Tensor, scaling: float | None) -> float:
    return float(scaling if scaling is not None else query.shape[-1] ** -0.5)


def _causal(query: Tensor) -> Tensor:
    rows = query.shape[2]
    return torch.full((1, 1, rows, rows), -torch.inf, dtype=query.dtype, device=query.device).triu(1)


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    own_alibi: Alibi | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one text for classes whose file has no such function, see ``own.py``."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    if own_alibi is not None:
        scores = scores + own_alibi.scores(slice(None), torch.arange(key.shape[2], device=key.device))
    weights = (scores + (_causal(query) if mask is None else mask)).float().softmax(-1).to(query.dtype)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def _noting_mask(**kwargs: Any) -> Tensor:
    """The mask that a class asks for, made by transformers' eager mask function; notes its window."""
    from transformers.masking_utils import eager_mask

    mask: Tensor = eager_mask(**(kwargs | {"allow_is_bidirectional_skip": False}))
    with suppress(UnsupportedError):  # for example of cross-attention; a layer that uses it is refused
        _noted.masks[mask.untyped_storage().data_ptr()] = mask, window_of(kwargs["mask_function"])
    return mask


CROSS: dict[str, Callable[[Tensor, int, float], Tensor]] = {}
"""Cross-attention by the names of operators: (1, heads, rows, dim) to (1, rows, heads, dim)."""


def _no_mask(*_: Any, config: Any = None, **__: Any) -> Tensor | None:
    """Replaces a mask: None, or a tensor for classes that do not take None (see ``own.py``)."""
    return torch.zeros(1) if getattr(config, "_any_mask", False) else None


SOURCE = "sakiyomi_source"
"""The attention of encoders in the CPU kernels."""


def _attend_source(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one source, whose places all see each other."""
    found: Tensor = torch.ops.sakiyomi_cpu.attend_source(query, key, value, _scaling(query, scaling))
    return found, None


@functools.cache
def register_source() -> None:
    """Make ``SOURCE`` known to transformers."""
    _register(SOURCE, _attend_source, _no_mask)


@functools.cache
def register(name: str, attend: Attend, cross: Callable[[Tensor, int, float], Tensor]) -> None:
    """Make an operator known to transformers, once a process; see ``AttentionBackend`` for what it computes."""
    _register(name, _attention_of(attend), _no_mask)
    CROSS[name] = cross


def _register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def note_calls(model: nn.Module, forward: Callable[[], object]) -> tuple[list[Any], list[LayerShape]]:
    """The layers that call attention in a pass, and the shape of each.

    Args:
        model: its attention is left switched to the probe.
        forward: runs the model.

    Raises:
        ValueError: the class supports only its own attention.
        UnsupportedError: a layer passes an argument that is not supported.
    """
    _switch_to_probe(model)
    dense.set_pass()
    vars(_noted).update(vars(_Noted()))
    try:
        forward()
        return _noted.callers, _noted.shapes
    finally:
        vars(_noted).update(vars(_Noted()))  # new lists


def _switch_to_probe(model: nn.Module) -> None:
    """Have a model call the probe.

    Raises:
        ValueError: its class says that it has only its own attention.
    """
    _register_probe()
    model.set_attn_implementation(PROBE)  # type: ignore[operator]


@functools.cache
def _register_probe() -> None:
    _register(PROBE, _noting, _noting_mask)
    CROSS[PROBE] = lambda q, layer, scaling: q.transpose(1, 2)


def layer_shapes(model: nn.Module, forward: Callable[[], object], layers: int | None) -> list[LayerShape] | None:
    """The shape of each attention layer, learnt from one small pass; None: the model does not call our operator.

    Some classes (falcon, mpt, bloom) accept another attention with a log line and keep their own. So the operator must
    have been called exactly once for every layer.

    Args:
        model: its attention is left switched to the probe.
        forward: runs the model on two tokens.
        layers: number of attention layers in the configuration; None: the model has other layers too, and those with
            attention are renumbered without them.
    """
    try:
        _switch_to_probe(model)
    except ValueError:  # the class supports only its own attention
        return None
    callers, shapes = note_calls(model, forward)
    if layers is None:
        for number, module in enumerate(callers):
            module.layer_idx = number
        return shapes if len(set(map(id, callers))) == len(callers) else None
    numbers = [int(module.layer_idx) for module in callers]
    found = {
        number: shape if shape.source is None else replace(shape, source=numbers[shape.source])
        for number, shape in zip(numbers, shapes, strict=True)
    }
    complete = len(shapes) == layers and sorted(found) == list(range(layers))
    return [found[layer] for layer in range(layers)] if complete else None
