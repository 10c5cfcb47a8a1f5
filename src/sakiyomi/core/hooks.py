"""Hooks on a model's modules, which may read or change the results of their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_IDLE = "transformers.utils.output_capturing"
"""Hooks that a call with ``output_hidden_states=True`` leaves behind, which do nothing in other calls."""


def hooks_of(module: nn.Module) -> list[int]:
    """Ids of the forward hooks and forward pre-hooks of a module, without idle ones."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return []
    found = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    return [number for number, hook in found if getattr(hook, "__module__", None) != _IDLE]


def unchanged(module: nn.Module) -> bool:
    """Whether a call of a module runs the forward of its class alone: without hooks, also of accelerate."""
    return not (hooks_of(module) or "forward" in vars(module) or hasattr(module, "_hf_hook"))
