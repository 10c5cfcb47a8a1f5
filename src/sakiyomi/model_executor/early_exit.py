"""The first layers of a model as a session of their own: the same weights, kernels and cache, an earlier exit."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.session import DRAFT_SIZES
from sakiyomi.model_executor.structural_copy import layer_list

__all__ = ["FirstLayers"]


class FirstLayers(ModelRunner):
    """The logits that a model would give if it ended after some of its layers: its final norm and head follow them.

    Nothing is copied but the modules that hold the list of layers. A pass writes keys and values of these layers into
    the model's own cache, in the columns that the plan says; a pass of the whole model over the same columns overwrites
    them, and what is behind a slot's length nobody reads. On a GPU its passes run without captured graphs.

    Args:
        whole: the model.
        count: layers that are run, at least 1 and fewer than there are.

    Raises:
        InputError: there are not so many.
        UnsupportedError: the model's layers are not one list of modules.
    """

    def __init__(self, whole: ModelRunner, count: int) -> None:
        layers = int(whole.config.num_hidden_layers)
        if not 1 <= count < layers:
            raise InputError(f"early exit after layer {count}; the model has {layers}: give one of 1 to {layers - 1}")
        if whole.weights.stateful:
            name = type(whole.module).__name__
            raise UnsupportedError(f"early exit: {name} has layers that keep something else than keys and values")
        whole.weights.unfold()
        whole.settle()
        self._whole = whole
        super().__init__(
            whole.weights,
            whole.cache,
            module=_cut(whole.module, count, layers),
            sources=whole.sources,
            eviction=whole.eviction,
            compile=whole.compile,
            first_sizes=DRAFT_SIZES,
            depth=count,
        )
        self.take_backend()

    def take_backend(self) -> None:
        """That of the whole model, on its modules as they are now."""
        whole = self._whole
        self.module = _cut(whole.module, self._depth, int(whole.config.num_hidden_layers))
        self._adopt(whole.backend)


def _cut(model: nn.Module, count: int, layers: int) -> Any:
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
