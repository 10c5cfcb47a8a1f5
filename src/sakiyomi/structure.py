"""A model's modules once more around the same tensors: what is switched or replaced in them is not the user's."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

__all__ = ["structural_copy"]


def structural_copy(model: nn.Module) -> Any:
    """The same modules again around the same parameter and buffer tensors, with a config of their own."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
