"""A model's modules: copies around the same tensors, so that changes do not touch the user's model; its layers."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.loading.stream import hooks

__all__ = ["distinct_layers", "first_layers", "layer_list", "structural_copy"]

_NUMBERS = ("idx", "index", "layer_id", "number")
"""Parts of names under which a layer keeps its own number."""


def structural_copy(model: nn.Module) -> Any:
    """The same modules again around the same parameter and buffer tensors, with a config of their own."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for hook in (hook for module in model.modules() for hook in hooks(module)):
        shared[id(hook.weights_map)] = hook.weights_map  # with all that it holds in memory
        tied = (getattr(hook, "tied_params_map", None) or {}).values()
        shared |= {id(tensor): tensor for places in tied for tensor in places.values()}
    return copy.deepcopy(model, shared)


def layer_list(model: nn.Module, count: int, what: str) -> str:
    """Name of the list of a model's layers.

    Args:
        model: of which it is a part.
        count: of the layers.
        what: needs it, the beginning of the message.

    Raises:
        UnsupportedError: there are several such lists, or none.
    """
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise UnsupportedError(
            f"{what}: {type(model).__name__} has {len(outer)} lists of {count} layers where one is expected"
        )
    return str(outer[0])


def first_layers(model: nn.Module, count: int, layers: int) -> Any:
    """The model with fewer layers: new modules on the way to the list of layers, all others are the model's own."""
    *way, last = layer_list(model, layers, "early exit").split(".")
    top = place = _shallow(model)
    for name in way:
        place._modules[name] = inner = _shallow(place.get_submodule(name))
        place = inner
    whole = place._modules[last]
    assert isinstance(whole, nn.ModuleList)
    place._modules[last] = nn.ModuleList(list(whole)[:count])
    return top.eval()


def _shallow(module: nn.Module) -> nn.Module:
    """The module again, with a dictionary of children of its own."""
    same = copy.copy(module)
    same._modules = dict(module._modules)
    for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate's, which would run the original
        vars(same).pop(name, None)
    return same


def distinct_layers(layers: nn.ModuleList) -> int:
    """How many of the first layers hold one of every kind: of the same modules, with the same settings."""
    kinds = [_kind(layer) for layer in layers]
    return max(map(kinds.index, kinds)) + 1


def _kind(layer: nn.Module) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for name, part in layer.named_modules():
        plain = [(key, value) for key, value in vars(part).items() if isinstance(value, bool | int | str | type(None))]
        found.append((name, type(part), *(item for item in plain if not any(part in item[0] for part in _NUMBERS))))
    return found
