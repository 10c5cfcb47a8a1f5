"""The state that a layer keeps of a text between passes: the protocol, and the registry of states beside attention.

Keys and values are one kind of state (``kv_store.py``). Convolutions and recurrences of transformers' own models, which
advance token by token, are handled in ``recurrent.py`` and ``model_executor/recurrences``. For any other layer, write a
class with the methods of ``ModuleState`` and register it by the class name of its module::

    LAYER_STATES["TheirMixer"] = MixerState

In our structural copy of a model, every such module then calls its state instead of its own forward. ``SlotCache``
has the states of all layers and forwards every operation on a slot to them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sakiyomi.cache.recurrent import Site
from sakiyomi.cache.recurrent_store import RecurrentStore
from sakiyomi.kernels.batch import BatchPlan


class LayerState(Protocol):
    """What one layer, or several of a kind, keep between passes, slot by slot.

    Lengths are tokens of a slot's text. A pass over a slot that holds `length` tokens writes its rows behind them; of a
    prompt's chunk all rows stay, of other passes those that ``commit`` names. Rows of a tree whose nodes come in
    several passes (``SequenceRows.done``) stay until the next commit, too.
    """

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""

    def begin(self, plan: BatchPlan) -> None:
        """A pass begins. It may run twice, or again after it has failed, and then writes the same rows again."""

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
        """The longest beginning of the slot's text, of at most `length` tokens, behind which a pass can continue."""

    def roll_back(self, slot: int, length: int) -> None:
        """Forget what lies behind so many tokens, a length that ``resumable`` gave."""

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        """Copy from another slot what it holds at `length` tokens, which is resumable there; `first` of them are in
        place already.

        Raises:
            MemoryLimitError: there is no memory for it.
        """

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """A copy on the CPU of what the slot holds at so many tokens, by name."""

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Fill an empty slot with what ``snapshot`` gave."""


class SiteForward(Protocol):
    """What computes the outputs of a module, or of a state function that it calls."""

    def forward(self, rows: Sequence[Tensor], fixed: Sequence[Tensor], plan: BatchPlan) -> Tensor:
        """The output for the rows of a pass, shaped like the first tensor, and the rows written.

        Args:
            rows: of a module its input, (1, N, hidden); of a function its inputs by row, (1, N, ...) each. Rows beyond
                ``plan.rows`` fill the pass up: nothing is written for them, and anything may come out.
            fixed: of a function what is the same for all rows.
            plan: of the pass.
        """


class ModuleState(LayerState, SiteForward, Protocol):
    """The state of one module of the model, which computes what the module would."""


LAYER_STATES: dict[str, Callable[[Any, int], ModuleState]] = {}
"""By the class name of a transformers module: makes the state of one such module for so many slots."""

Served = nn.Module | Site
"""A module of a registered class, or a call of a state function, that has a state."""


@dataclass(frozen=True)
class LayerStates:
    """What the layers of one cache keep beside keys and values.

    Attributes:
        stores: receive every operation on a slot.
        sites: compute outputs, by the number that the model's modules have.
    """

    stores: Sequence[LayerState] = ()
    sites: Mapping[int, SiteForward] = field(default_factory=dict)


_numbers = itertools.count()


def next_number() -> int:
    """A number for a module or a call that keeps a state."""
    return next(_numbers)


class _Pass(threading.local):
    """The running pass of this thread."""

    plan: BatchPlan | None = None
    sites: Mapping[int, SiteForward] = MappingProxyType({})


_pass = _Pass()


def begin_pass(plan: BatchPlan | None, states: LayerStates) -> None:
    """Describe this thread's next pass, and the states that it reads and writes; None: the pass is over."""
    _pass.plan, _pass.sites = plan, states.sites
    if plan is not None:
        for store in states.stores:
            store.begin(plan)


def in_pass() -> bool:
    """Whether a pass has begun in this thread; other calls run on a text of their own."""
    return _pass.plan is not None


def serve_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Have every module of a registered class call its state in a pass; returns the modules by number.

    Args:
        model: our structural copy; changed in place.
    """
    served: list[Any] = [module for module in model.modules() if type(module).__name__ in LAYER_STATES]
    found = {next_number(): module for module in served}
    for number, module in found.items():
        module.forward = _through(number)
    return found


def make_states(served: Mapping[int, Served], slots: int, available: Callable[[], int] | None = None) -> LayerStates:
    """States of these modules and calls for a cache of so many slots.

    Args:
        served: by number.
        slots: of the cache.
        available: returns the bytes that may still be allocated; None: no limit is known.
    """
    sites = {number: site for number, site in served.items() if isinstance(site, Site)}
    modules = {
        number: LAYER_STATES[type(module).__name__](module, slots)
        for number, module in served.items()
        if not isinstance(module, Site)
    }
    stores: list[LayerState] = list(modules.values())
    if not sites:
        return LayerStates(stores, modules)
    recurrent = RecurrentStore(sites, slots, available)
    return LayerStates([*stores, recurrent], {**modules, **recurrent.sites})


def layer_state(rows: Sequence[Tensor], fixed: Sequence[Tensor], number: int, *, compiled: bool = False) -> Tensor:
    """The operator that stands in a model for what keeps a state, see ``SiteForward``; that of the compiled kernels."""
    operator = torch.ops.sakiyomi_cpu.recur if compiled else torch.ops.sakiyomi.layer_state
    found: Tensor = operator(list(rows), list(fixed), number)
    return found


def _through(number: int) -> Callable[..., Tensor]:
    """A forward that calls an operator, so that models with states can be recorded like any other."""

    def forward(*inputs: Tensor, **named: Any) -> Tensor:
        return layer_state([inputs[0] if inputs else named["hidden_states"]], [], number)

    return forward


def _layer_state(rows: list[Tensor], fixed: list[Tensor], number: int) -> Tensor:
    site, plan = _pass.sites.get(number), _pass.plan
    return torch.zeros_like(rows[0]) if site is None or plan is None else site.forward(rows, fixed, plan)


_library = torch.library.Library("sakiyomi", "FRAGMENT")
_library.define("layer_state(Tensor[] rows, Tensor[] fixed, int number) -> Tensor")
_library.impl("layer_state", _layer_state, "CompositeExplicitAutograd")
