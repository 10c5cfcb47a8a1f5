"""The first layers of a packed model as a model of their own: the same weights, kernels and cache, an earlier exit."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.model_executor.compiled import Graphs
from sakiyomi.model_executor.runner import DRAFT_SIZES, SIZES, ModelRunner

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
        self._whole, self._count = whole, count
        self._share()

    def settle(self) -> None:
        """Follow the whole model, which is settled first, to its kernels. Only while no request runs."""
        if self.state is not self._whole.state or self.unsettled != self._whole.unsettled:
            seconds, watchers = self.forward_seconds, self.watchers
            self._share()
            self.forward_seconds, self.watchers = seconds, watchers

    def _share(self) -> None:
        whole = self._whole
        own = {"_whole": whole, "_count": self._count}
        self.__dict__.update({**whole.__dict__, **own})
        self._model = _cut(whole.module, self._count, int(whole.config.num_hidden_layers))
        self._layers, self._proven = self._count, False
        self.forward_seconds, self.watchers = 0.0, []
        self._seconds, self._warm, self._buffers = {}, set(), {}
        self.exact, self.sizes, self.first_sizes = False, SIZES, DRAFT_SIZES
        self.graphs, self._captured = None, None
        if whole.graphs is not None:
            self.graphs = Graphs(self._model, self.tap, self.state, self.device, SIZES, self.first_sizes)
            if self._compile is True:
                self.graphs.make(SIZES)


def _cut(model: nn.Module, count: int, layers: int) -> Any:
    """The model with fewer layers: new modules on the way to the list of layers, all others are the model's own."""
    lists = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == layers
    ]
    if len(lists) != 1:
        raise UnsupportedError(
            f"early exit: {type(model).__name__} has {len(lists)} lists of {layers} layers where one is expected"
        )
    top = place = _shallow(model)
    *way, last = lists[0].split(".")
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
