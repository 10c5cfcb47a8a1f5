"""Detects whether a model changed since it was packed: its user may train it, merge adapters into it, or move it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ModelState"]

SAMPLES = 16
"""Values of each tensor that are compared."""
_PLAIN = (bool, int, float, str)  # not None: in its place some classes put what they keep of a text
_PASSING = {"training", "max_seq_len_cached"}
"""Attributes that change while a model is used as it is."""
_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies follow the length of the text."""


class ModelState:
    """A record of a model: its tensors, some values of each, and the settings of its modules.

    Addresses and version counters show assignments and changes in place. A write through ``.data``, as merging an
    adapter makes, changes neither: so a few values of each tensor are compared as well. A change of a few entries
    through ``.data`` may pass unseen.

    Args:
        model: as it is now. It is not kept alive; its tensors are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors, self._modules = _tensor_facts(model), _module_facts(model)
        self._views = [view for tensor in _tensors(model) if (view := _view(tensor)) is not None]
        self._values = self._look()

    def changed(self, model: nn.Module) -> str | None:
        """What changed, in words; None: nothing did."""
        if _tensor_facts(model) != self._tensors:
            return "its weights"
        if any(not torch.equal(old, new) for old, new in zip(self._values, self._look(), strict=True)):
            return "values of its weights"
        return "what its modules are set to" if _module_facts(model) != self._modules else None

    def _look(self) -> list[Tensor]:
        """The compared values as bytes, so that a NaN equals itself."""
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for view in self._views:
            groups.setdefault((view.dtype, view.device), []).append(view)
        return [torch.cat(group).view(torch.uint8) for group in groups.values()]


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    for module in model.modules():
        kinds = str(vars(module).get("rope_type"))  # one, or those of kinds of layers
        moves = any(kind in kinds for kind in _BY_LENGTH)
        yield from (b for name, b in module._buffers.items() if b is not None and not (moves and "inv_freq" in name))


def _tensor_facts(model: nn.Module) -> list[tuple[Any, ...]]:
    return [_facts(tensor) for tensor in _tensors(model)]


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_meta:  # its values come by hooks
        return tensor.dtype, tensor.shape
    if type(tensor) not in (Tensor, nn.Parameter):  # of a library that rounds: it may have no address
        return (id(tensor),)
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride()


def _view(tensor: Tensor) -> Tensor | None:
    """Some values of a tensor, without a copy; None where they cannot be had so."""
    dense = tensor.numel() and type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not dense or tensor.is_meta or not tensor.is_contiguous():
        return None
    flat = tensor.detach().view(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]


def _module_facts(model: nn.Module) -> list[tuple[Any, ...]]:
    facts: list[tuple[Any, ...]] = []
    for module in model.modules():
        own: list[Any] = [type(module), id(vars(module).get("forward"))]
        own += [*module._forward_hooks, *module._forward_pre_hooks]
        for name, value in vars(module).items():
            if name not in _PASSING and type(value) in _PLAIN:
                own.append((name, value))
            elif (type(value) in (list, tuple) or (type(value) is dict and name[:1] != "_")) and len(value) < SAMPLES:
                parts = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
                if all(type(part) in _PLAIN for part in parts):
                    own.append((name, parts))
        facts.append(tuple(own))
    return facts
