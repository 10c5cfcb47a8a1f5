"""Copies a model's modules around the same tensors, so that changes to them do not touch the user's model."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sakiyomi.model_executor.loading.stream import hooks

__all__ = ["structural_copy"]


def structural_copy(model: nn.Module) -> Any:
    """The same modules again around the same parameter and buffer tensors, with a config of their own."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for hook in (hook for module in model.modules() for hook in hooks(module)):
        shared[id(hook.weights_map)] = hook.weights_map  # with all that it holds in memory
        tied = (getattr(hook, "tied_params_map", None) or {}).values()
        shared |= {id(tensor): tensor for places in tied for tensor in places.values()}
    return copy.deepcopy(model, shared)
