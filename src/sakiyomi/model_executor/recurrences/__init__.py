"""Recurrent layers of transformers' own classes, unmodified: only our copy calls other state functions.

The modules compute their states in a few functions of their module files. A module of our structural copy gets a
forward with the same code and other globals, in which our functions replace these. The class and all other models of it
stay as they are. To add a kind, write a ``StateFunction`` in a file beside this one, and a line in
``STATE_FUNCTIONS``.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.layer_state import LAYER_STATES, in_pass, layer_state, next_number
from sakiyomi.cache.recurrent import Site
from sakiyomi.core.rebinding import global_names, rebound
from sakiyomi.model_executor.recurrences.base import StateFunction
from sakiyomi.model_executor.recurrences.gated_delta import GatedDelta, KimiDelta
from sakiyomi.model_executor.recurrences.mamba1 import Mamba1
from sakiyomi.model_executor.recurrences.mamba2 import Mamba2
from sakiyomi.model_executor.recurrences.rg_lru import RgLru
from sakiyomi.model_executor.recurrences.short_conv import ConvModule, ShortConv

__all__ = ["STATE_FUNCTIONS", "StateFunction", "has_state_functions", "serve_functions", "stateful_modules"]

STATE_FUNCTIONS: dict[str, StateFunction] = {
    "causal_conv1d_fn": ShortConv(),
    "torch_chunk_gated_delta_rule": GatedDelta(),
    "chunk_kimi_delta_attention": KimiDelta(),
    "mamba2_chunk_scan": Mamba2(),
    "mamba_selective_scan": Mamba1(),
    "RecurrentGemmaRecurrentBlock.conv_1d": ConvModule(),
    "RecurrentGemmaRglru._rnn_scan": RgLru(),
}
"""By the name of a function that modules call, or of a method or child of a class, which gets the module."""


def has_state_functions(model_class: type) -> bool:
    """Whether the file of a model's class has state functions that we replace."""
    names = vars(sys.modules[model_class.__module__])
    return any(name.partition(".")[0] in names for name in STATE_FUNCTIONS)


def stateful_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that keep a state: those of ``LAYER_STATES``, and those that call state functions."""
    return [
        module
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # of a recording, which has no state
        and (type(module).__name__ in LAYER_STATES or _named(module) or _called(type(module).forward))
    ]


def serve_functions(modules: Sequence[nn.Module]) -> dict[int, Site]:
    """Have modules that call state functions call ours.

    Args:
        modules: of our structural copy; changed in place.

    Returns:
        The calls by number, which the model's first forward adds; it must not be traced.
    """
    served: dict[int, Site] = {}
    for module in modules:
        calls = _Calls(served)
        for name, function in _named(module).items():
            target = getattr(module, name)
            if isinstance(target, nn.Module):
                target.forward = functools.partial(calls.stand_in(function), target)
            else:
                setattr(module, name, functools.partial(calls.stand_in(function), module))
        forward = type(module).forward
        if wanted := _called(forward):
            ours = {name: calls.stand_in(STATE_FUNCTIONS[name]) for name in wanted}
            _put(module, types.MethodType(rebound(forward, ours), module))
        module.register_forward_pre_hook(calls.begin)
    return served


class _Calls:
    """The calls of state functions in one forward of a module, numbered in their order."""

    def __init__(self, served: dict[int, Site]) -> None:
        self._served = served
        self._numbers: list[int] = []
        self._place = threading.local()  # models run beside each other

    def begin(self, module: nn.Module, inputs: Any) -> None:
        """Called when the module's forward begins."""
        self._place.next = 0

    def stand_in(self, function: StateFunction) -> Callable[..., Any]:
        """The replacement of a state function."""

        def run(rows: Sequence[Tensor], fixed: Sequence[Tensor] = (), around: int = 0) -> Tensor:
            place = self._place.next
            self._place.next = place + 1
            if place == len(self._numbers):
                self._numbers.append(next_number())
            number = self._numbers[place]
            site = self._served.get(number)
            if site is None:
                site = self._served[number] = Site(function)
                site.learn(rows, fixed, around)
            if not in_pass():  # a probe or a measurement: a text from its beginning
                return site.whole(rows, fixed)
            return layer_state(rows, fixed, number, compiled=site.compiled)

        return functools.partial(function.call, run)


def _named(module: nn.Module) -> dict[str, StateFunction]:
    """State functions that are methods or children of a module, by their names there."""
    own = f"{type(module).__name__}."
    return {name.removeprefix(own): kind for name, kind in STATE_FUNCTIONS.items() if name.startswith(own)}


def _called(forward: Callable[..., Any]) -> set[str]:
    """Names of state functions in the code of a forward."""
    return STATE_FUNCTIONS.keys() & global_names(forward)


def _put(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward, below the hooks of accelerate where it has any."""
    setattr(module, "_old_forward" if hasattr(module, "_old_forward") else "forward", forward)
