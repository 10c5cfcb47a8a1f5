"""What a layer keeps of a text between passes: the protocol of all kinds, and the registry of those beside attention.

Keys and values are the first kind (``kv_store.py``). A layer of another kind (a convolution over the last tokens, a
recurrent state) keeps something else of each slot. To add one, write a class with the methods of ``ModuleState`` and
register how it is made, by the class name of the transformers module that it serves::

    LAYER_STATES["Lfm2ShortConv"] = ShortConvState

In our structural copy of a model, every such module then calls its state instead of its own forward. ``SlotCache``
has the states of all layers and passes on to them whatever happens to a slot.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sakiyomi.kernels.batch import BatchPlan

__all__ = ["LAYER_STATES", "LayerState", "ModuleState", "begin_pass", "make_states", "serve_modules"]


class LayerState(Protocol):
    """What one layer, or several of a kind, keep between passes, slot by slot.

    Lengths are tokens of a slot's text. A pass over a slot that holds `length` tokens writes its rows behind them; of a
    prompt's chunk all rows stay, of other passes those that ``commit`` names. Rows of a tree whose nodes come in
    several passes (``SequenceRows.done``) stay until the next commit, too.
    """

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""

    def clear(self, slot: int) -> None:
        """A text begins in this slot."""

    def reserve(self, slot: int, columns: int) -> None:
        """Make room for so many tokens in a slot.

        Raises:
            MemoryLimitError: there is no memory for them; nothing has changed then.
        """

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Of the pass that wrote rows behind `length` tokens keep these, ascending, and drop the others."""

    def resumable(self, slot: int, length: int) -> int:
        """The longest beginning of the slot's text, of at most `length` tokens, from which a pass can go on."""

    def roll_back(self, slot: int, length: int) -> None:
        """Forget what lies behind so many tokens, a length that ``resumable`` gave."""

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        """Copy from another slot what it holds at `length` tokens, which is resumable there; `first` of them are the
        same already.

        Raises:
            MemoryLimitError: there is no memory for it.
        """

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """A copy on the CPU of what the slot holds at so many tokens, by name."""

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Fill an empty slot with what ``snapshot`` gave."""


class ModuleState(LayerState, Protocol):
    """The state of one module of the model, which computes what the module would."""

    def forward(self, rows: Tensor, plan: BatchPlan) -> Tensor:
        """The module's output for the rows of a pass, and the rows written; (1, N, hidden) each.

        Rows beyond ``plan.rows`` fill the pass up: nothing is written for them, and anything may come out.
        """


LAYER_STATES: dict[str, Callable[[Any, int], ModuleState]] = {}
"""By the class name of a transformers module: makes the state of one such module for so many slots."""

States = Mapping[int, ModuleState]
"""The states of one cache by the number of the module that each serves."""

_numbers = itertools.count()


class _Pass(threading.local):
    """The running pass of this thread, and whose it is: a graph that is compiled in the background has none."""

    plan: BatchPlan | None = None
    states: States = MappingProxyType({})


_pass = _Pass()


def begin_pass(plan: BatchPlan | None, states: States) -> None:
    """Say what this thread's next pass looks like, and which states it reads and writes; None: it is over."""
    _pass.plan, _pass.states = plan, states


def serve_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Have every module of a registered class call the state that a pass has for it; by numbers of their own.

    The layers with attention are numbered anew without them.

    Args:
        model: our structural copy; changed in place.
    """
    served: list[Any] = [module for module in model.modules() if type(module).__name__ in LAYER_STATES]
    found = {next(_numbers): module for module in served}
    for number, module in found.items():
        module.forward = _through(number)
    theirs = {int(module.layer_idx) for module in served}
    others: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    for module in others if theirs else ():
        if module.layer_idx not in theirs:
            module.layer_idx -= sum(number < module.layer_idx for number in theirs)
    return found


def make_states(served: Mapping[int, nn.Module], slots: int) -> States:
    """States of these modules for a cache of so many slots."""
    return {number: LAYER_STATES[type(module).__name__](module, slots) for number, module in served.items()}


def _through(number: int) -> Callable[..., Tensor]:
    """A forward that goes through an operator, so that graphs are made of a model with states like of any other."""

    def forward(*inputs: Tensor, **named: Any) -> Tensor:
        rows = inputs[0] if inputs else named["hidden_states"]
        found: Tensor = torch.ops.sakiyomi.layer_state(rows, number)
        return found

    return forward


def _layer_state(rows: Tensor, number: int) -> Tensor:
    state, plan = _pass.states.get(number), _pass.plan
    return torch.zeros_like(rows) if state is None or plan is None else state.forward(rows, plan)


_library = torch.library.Library("sakiyomi", "FRAGMENT")
_library.define("layer_state(Tensor rows, int number) -> Tensor")
_library.impl("layer_state", _layer_state, "CompositeExplicitAutograd")


@torch.library.register_fake("sakiyomi::layer_state", lib=_library)  # type: ignore[untyped-decorator]
def _(rows: Tensor, number: int) -> Tensor:
    return torch.empty_like(rows)
