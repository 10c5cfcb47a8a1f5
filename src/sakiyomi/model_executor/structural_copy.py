"""Copies of a model's modules around the same tensors, so that changes do not touch the user's model; its layers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.loading.stream import hooks

_NUMBERS = ("idx", "index", "layer_id", "number")
"""Parts of the names of attributes that hold a layer's own number."""
_PLAIN = bool, int, str, type(None)


def structural_copy(model: nn.Module, *, owned: bool = False) -> Any:
    """Copies of a model's modules around the same parameter and buffer tensors, with their own configuration.

    Their parameters require no gradients: torch would compute products differently.

    Args:
        model: the model to copy.
        owned: the caller has no other use for the model; the copy shares its parameters, which packing frees.
    """
    if owned:
        model.requires_grad_(False)
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for tensor in model.parameters():
        if tensor.requires_grad and type(tensor) is nn.Parameter:
            shared[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
    for hook in (hook for module in model.modules() for hook in hooks(module)):
        shared[id(hook.weights_map)] = hook.weights_map  # shared, with all that it holds in memory
        tied = (getattr(hook, "tied_params_map", None) or {}).values()
        shared |= {id(tensor): tensor for places in tied for tensor in places.values()}
    return copy.deepcopy(model, shared)


def layer_list(model: nn.Module, count: int, what: str) -> str:
    """Name of the list of a model's layers.

    Args:
        model: the model.
        count: number of the layers.
        what: names the feature that needs the list, for the message.

    Raises:
        UnsupportedError: there are several such lists, or none.
    """
    outer = _paths(model, lambda part: _is_list(part, count))
    if len(outer) != 1:
        raise UnsupportedError(
            f"{what}: {type(model).__name__} has {len(outer)} lists of {count} layers where one is expected"
        )
    return outer[0]


def _is_list(module: nn.Module, count: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == count


def _paths(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[str]:
    """Names of the wanted modules; the modules inside a wanted one are not searched."""
    found, seen, waiting = [], set[int](), [("", model)]
    while waiting:
        path, module = waiting.pop()
        for name, part in module.named_children():
            if id(part) not in seen:
                seen.add(id(part))
                if wanted(part):
                    found.append(path + name)
                else:
                    waiting.append((f"{path}{name}.", part))
    return found


class _Headless(nn.Identity):
    """Replaces a head: returns the head's input, and has the head's hooks."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self._forward_pre_hooks = head._forward_pre_hooks


def some_layers(model: nn.Module, chosen: Sequence[int], layers: int, *, head: bool = True) -> Any:
    """The model with fewer layers: new modules on the way to what changes, all others are the model's own.

    Args:
        model: with so many ``layers``.
        chosen: numbers of the layers that stay.
        layers: of the model.
        head: False leaves the head out, which is as large as many layers.
    """
    top = _shallow(model)
    name = layer_list(model, layers, "early exit")
    whole = model.get_submodule(name)
    assert isinstance(whole, nn.ModuleList)
    _put(top, model, name, nn.ModuleList([whole[layer] for layer in chosen]))
    if not head:
        last = model.get_output_embeddings()  # type: ignore[operator]
        found = _paths(model, lambda part: part is last or _is_list(part, layers))
        _put(top, model, next(path for path in found if model.get_submodule(path) is last), _Headless(last))
    return top.eval()


def _put(top: nn.Module, model: nn.Module, path: str, new: nn.Module) -> None:
    """Put a module into a shallow copy of a model, and shallow copies on the way to it where they are still missing."""
    *way, last = path.split(".")
    for name in way:
        if top._modules[name] is model._modules[name]:
            top._modules[name] = _shallow(model.get_submodule(name))
        top, model = top.get_submodule(name), model.get_submodule(name)
    top._modules[last] = new


def settings_of(model: nn.Module, chosen: Sequence[int], layers: int) -> AbstractContextManager[None]:
    """A context in which settings by layer in a model's configurations are those of these layers."""

    def of_these(_: str, value: Any) -> Any:
        return [value[layer] for layer in chosen] if isinstance(value, list) and len(value) == layers else value

    return changed_settings(model, of_these)


@contextmanager
def changed_settings(model: nn.Module, change: Callable[[str, Any], Any]) -> Iterator[None]:
    """A context in which settings in a model's configurations are changed by `change`, given name and value."""
    found = [vars(part)["config"] for part in model.modules() if "config" in vars(part)]
    configs = {id(config): vars(config) for config in found}
    changed = [
        (config, name, value, new)
        for config in configs.values()
        for name, value in config.items()
        if (new := change(name, value)) is not value
    ]
    try:
        for config, name, _, new in changed:
            config[name] = new
        yield
    finally:
        for config, name, value, _ in changed:
            config[name] = value


def _shallow(module: nn.Module) -> nn.Module:
    """A copy of a module with its own dictionary of children."""
    same = copy.copy(module)
    same._modules = dict(module._modules)
    for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate's, which would run the original
        vars(same).pop(name, None)
    return same


def layer_kinds(layers: nn.ModuleList) -> list[list[tuple[Any, ...]]]:
    """By layer: its modules and their settings, without the layer's number."""
    return [_kind(layer) for layer in layers]


def distinct_layers(layers: nn.ModuleList) -> list[int]:
    """The first layer of every kind; layers of a kind have the same modules and settings."""
    kinds = layer_kinds(layers)
    return sorted({kinds.index(kind) for kind in kinds})


def _kind(layer: nn.Module) -> list[tuple[Any, ...]]:
    def told(part: nn.Module) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in vars(part).items() if isinstance(value, _PLAIN) and _says(key)]

    return [(name, type(part), *told(part)) for name, part in layer.named_modules()]


@functools.cache
def _says(name: str) -> bool:
    """Whether an attribute of this name is no number of a layer."""
    return not any(part in name for part in _NUMBERS)
