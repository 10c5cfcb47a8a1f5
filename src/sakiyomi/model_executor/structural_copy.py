"""A model's modules: copies around the same tensors, so that changes do not touch the user's model; its layers."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.loading.stream import hooks

__all__ = ["layer_list", "structural_copy"]


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
