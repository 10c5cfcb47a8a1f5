"""Detects whether a model changed since it was packed: its user may train it, merge adapters into it, or move it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from copy import copy
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.hooks import hooks_of

RUN = 8
"""Number of neighbouring values that are compared, at a third and at two thirds of each tensor."""
FEW = 16
_PLAIN = (bool, int, float, str)  # not None: some classes replace it by a cache of a text
_PASSING = {"training", "max_seq_len_cached", "_output_capturing_hooks_installed", "_previous_max_cache_length"}
"""Attributes that change while an unchanged model is in use."""
_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies depend on the length of the text."""


class ModelState:
    """A record of a model: its tensors, some values of each, and the settings of its modules.

    Addresses and version counters show assignments and changes in place. A write through ``.data``, for example when an
    adapter is merged, changes neither. So a few values of each tensor are compared as well; a change of a few other
    entries through ``.data`` is not noticed.

    Args:
        model: the model as it is now. Its tensors are kept alive, the model is not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors, self._modules = _tensor_facts(model), _module_facts(model)
        self._views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in _tensors(model):
            self._views.setdefault((tensor.dtype, tensor.device), []).extend(_some(tensor))
        self._values = self._look()
        self._parts = _Parts(model)

    def changed(self, model: nn.Module) -> str | None:
        """What changed, in words; None: nothing changed."""
        same = self._parts.same()
        if not same and _tensor_facts(model) != self._tensors:
            return "its weights"
        if any(not torch.equal(old, new) for old, new in zip(self._values, self._look(), strict=True)):
            return "values of its weights"
        if not same:
            if (now := _module_facts(model)) != self._modules:
                return f"what its modules are set to ({_first_change(self._modules, now)})"
            self._parts = _Parts(model)
        return None

    def _look(self) -> list[Tensor]:
        """The compared values as bytes, so that a NaN equals itself."""
        return [torch.cat(group).view(torch.uint8) for group in self._views.values() if group]


class _Parts:
    """The objects that a model consists of. Comparing them takes a tenth of the time of the full comparison.

    If it finds a difference, the model may still be unchanged: the full comparison decides.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self._modules = [weakref.ref(module) for module in modules]
        self._hanging = _hanging(modules)
        self._names = [[*_settings(module)] for module in modules]
        self._values = _values(modules, self._names)
        self._lists = [(value, copy(value)) for value in self._values if type(value) not in _PLAIN]
        tensors = {id(t): t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
        self._alive = [*tensors.values()]
        self._dense = [tensor for tensor in self._alive if _is_dense(tensor) and not tensor.is_inference()]
        self._places = _places(self._dense)

    def same(self) -> bool:
        """Whether each object is still there, and no tensor was written to (except through ``.data``)."""
        modules = [module for place in self._modules if (module := place()) is not None]
        if len(modules) < len(self._modules) or _hanging(modules) != self._hanging:
            return False
        if not all(map(is_, _values(modules, self._names), self._values)):
            return False
        return all(now == before for now, before in self._lists) and _places(self._dense) == self._places


def _values(modules: list[nn.Module], names: list[list[str]]) -> list[Any]:
    """Values of the named attributes of each module."""
    found: list[Any] = []
    for module, wanted in zip(modules, names, strict=True):
        if wanted:
            found += map(module.__dict__.get, wanted)
    return found


def _hanging(modules: list[nn.Module]) -> list[Any]:
    """Classes, hooks, children, parameters and buffers of modules, by their ids."""
    found: list[Any] = []
    for module in modules:
        own = module.__dict__
        found += (type(module), len(own), id(own.get("forward")), *own["_forward_hooks"], *own["_forward_pre_hooks"])
        for parts in (own["_modules"], own["_parameters"], own["_buffers"]):
            if parts:
                found += map(id, parts.values())
    return found


def _places(tensors: list[Tensor]) -> list[Any]:
    return [(tensor.data_ptr(), tensor._version, tensor.stride()) for tensor in tensors]


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


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has an address, and values there."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def _some(tensor: Tensor) -> list[Tensor]:
    """Some values of a tensor, as views; none if there are no such views."""
    if not _is_dense(tensor) or not tensor.is_contiguous():
        return []
    flat = tensor.detach().view(-1)
    return [flat[place : place + RUN] for place in (flat.numel() // 3, 2 * flat.numel() // 3)]


def _module_facts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By name of a module: its class, its forward, its hooks and its settings."""
    facts: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        runs = {"its class": type(module), "forward": id(vars(module).get("forward")), "its hooks": hooks_of(module)}
        facts[name] = runs | _settings(module)
    return facts


def _first_change(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> str:
    """The first difference between two records of a model's modules, in words."""
    for name in before | now:
        old, new = before.get(name), now.get(name)
        where = name or "the model"
        if old is None or new is None:
            return f"{where} is {'new' if old is None else 'gone'}"
        for what in old | new:
            if old.get(what) != new.get(what):
                return f"{what} of {where}"
    return "their order"


def _settings(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of a module, and short lists and dicts of plain values."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name not in _PASSING and type(value) in _PLAIN:
            found[name] = value
        elif (type(value) in (list, tuple) or (type(value) is dict and name[:1] != "_")) and len(value) < FEW:
            parts = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
            if all(type(part) in _PLAIN for part in parts):
                found[name] = parts
    return found
