"""Hooks on a model's modules: whether anybody listens to their calls, or changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_IDLE = "transformers.utils.output_capturing"
"""Hooks that a call with ``output_hidden_states=True`` leaves behind, which do nothing in other calls."""


def hooks_of(module: nn.Module) -> list[int]:
    """Numbers of the hooks by which calls of this module do more, or something else."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return []
    found = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    return [number for number, hook in found if getattr(hook, "__module__", None) != _IDLE]


def has_hooks(module: nn.Module) -> bool:
    """Whether there are such."""
    return bool(hooks_of(module))
