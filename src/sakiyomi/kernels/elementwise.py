"""Gated activations and rotary embeddings by the kernels of their device.

A kernel replaces several calls of torch, each of which writes all rows to memory. Candidates are found by name, and
tested on random rows: only a module or function with the results of a known form is replaced.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sakiyomi.core.hooks import unchanged
from sakiyomi.core.rebinding import global_names, rebound
from sakiyomi.kernels.device import operators
from sakiyomi.kernels.native import DTYPES, PackedLinear
from sakiyomi.kernels.norms import ROWS, closest

ACTIVATIONS = (0, 1)  # as in elementwise.h: SiLU, GELU by tanh
ROTARY = "apply_rotary_pos_emb"


# ---------------------------------------------------------------- gated activations


class _Gate(NamedTuple):
    """A module whose result is down(act(gate) * up), by the names of its layers; one layer may give gate and up."""

    layers: tuple[str, ...]
    down: str
    gate: int  # index of the gate among the outputs of the layers
    form: int


def serve_gates(model: nn.Module) -> int:
    """Have the gated feed-forward modules of a model call the kernels; returns the number of such modules.

    Modules with their own forward, and those whose activation has hooks, stay as they are.

    Args:
        model: its linear layers are packed; changed in place.
    """
    served = 0
    for module in model.modules():
        names = [name for name, child in module.named_children() if _product(child)]
        if len(names) in (2, 3) and _bare(module, names) and (found := _gate_of(module, names)) is not None:
            module.forward = functools.partial(_gated, module, found)
            served += 1
    return served


def _product(layer: nn.Module) -> bool:
    """Whether it is a linear layer that a kernel may precede or follow."""
    if isinstance(layer, PackedLinear):
        return True
    device = layer.weight.device if isinstance(layer, nn.Linear) else None
    return (
        device is not None and device.type == "cuda" and layer.weight.dtype in DTYPES and operators(device) is not None
    )


def _bare(module: nn.Module, layers: list[str]) -> bool:
    """Whether a module consists of these layers and activations only, and its forward only takes rows."""
    if "forward" in vars(module) or module._parameters or module._buffers:
        return False
    others = [part for name, child in module.named_children() if name not in layers for part in child.modules()]
    if any(part._parameters or not unchanged(part) for part in others):
        return False
    return len(inspect.signature(type(module).forward).parameters) == 2


def _gated(module: Any, gate: _Gate, *rows: Tensor, **named: Tensor) -> Tensor:
    (x,) = (*rows, *named.values())
    made = [getattr(module, name)(x) for name in gate.layers]
    if len(made) == 1:
        made = list(made[0].chunk(2, -1))
    inner = operators(x.device).gated(made[gate.gate], made[1 - gate.gate], gate.form)
    return getattr(module, gate.down)(inner)  # type: ignore[no-any-return]


class _Stub(nn.Module):
    """Replaces a linear layer: keeps its inputs, and returns random rows."""

    def __init__(self, layer: Any, seed: int) -> None:
        super().__init__()
        self.given: list[Tensor] = []
        self.made = 3 * _random(1, ROWS, layer.out_features, seed=seed).to(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(x)
        return self.made


@torch.no_grad()
def _gate_of(module: nn.Module, names: list[str]) -> _Gate | None:
    """The form of a gated module; None: it is something else."""
    layers: list[Any] = [module.get_submodule(name) for name in names]
    stubs = {name: _Stub(layer, i) for i, (name, layer) in enumerate(zip(names, layers, strict=True))}
    trial = copy.copy(module)
    trial._modules = {**module._modules, **stubs}
    x = _random(1, ROWS, layers[0].in_features, seed=9).to(layers[0].weight)
    try:
        out = type(module).forward(trial, x)
    except Exception:  # of any kind: it is no such module
        return None
    if any(len(stub.given) != 1 for stub in stubs.values()):
        return None
    down = next((name for name, stub in stubs.items() if stub.made is out), None)
    first = tuple(name for name in names if name != down)
    if down is None or any(stubs[name].given[0] is not x for name in first):
        return None
    wanted = stubs[down].given[0]
    made = [stubs[name].made for name in first] if len(first) == 2 else [*stubs[first[0]].made.chunk(2, -1)]
    if any(part.shape != wanted.shape or part.dtype != wanted.dtype for part in made):
        return None

    def compute(kind: tuple[int, int]) -> Tensor:
        gate, form = kind
        return operators(x.device).gated(made[gate], made[1 - gate], form)  # type: ignore[no-any-return]

    found = closest(itertools.product((0, 1), ACTIVATIONS), compute, wanted)
    return None if found is None else _Gate(first, down, *found)


# ---------------------------------------------------------------- rotary embeddings


def serve_rotary(model: nn.Module) -> int:
    """Have the attention modules of a model rotate queries and keys by the kernels; returns their number.

    They call a function of their module file. Our copy of the forward calls another one instead: the class and all
    other models of it stay as they are.

    Args:
        model: our structural copy; changed in place.
    """
    served, known = 0, dict[Any, bool]()
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module) or ROTARY not in global_names(forward):
            continue
        theirs = inspect.unwrap(forward).__globals__.get(ROTARY)
        weight = next((child.weight for child in module.children() if _product(child)), None)
        if not isinstance(weight, Tensor) or weight.dtype not in DTYPES or theirs is None:
            continue
        kind = theirs, weight.dtype, weight.device
        if kind not in known:
            known[kind] = _turns_halves(theirs, weight)
        if known[kind]:
            ours = {ROTARY: functools.partial(_rotate, theirs)}
            module.forward = types.MethodType(rebound(forward, ours), module)
            served += 1
    return served


def _rotate(
    theirs: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *others: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Queries and keys (1, heads, N, dim), cosines and sines (1, N, width)."""
    alike = q.dtype == k.dtype == cos.dtype == sin.dtype
    if others or named or not alike or q.ndim != 4 or cos.ndim != 3:
        return theirs(q, k, cos, sin, *others, **named)
    rotate = operators(q.device).rotate
    return rotate(q, cos, sin), rotate(k, cos, sin)


@torch.no_grad()
def _turns_halves(theirs: Callable[..., Any], like: Tensor) -> bool:
    """Whether a function has the results of the kernel for this dtype and device, on the CPU to the last bit."""
    q, k = (_random(1, ROWS, heads, 16, seed=heads).to(like).transpose(1, 2) for heads in (3, 2))
    cos, sin = (_random(1, ROWS, 16, seed=seed).to(like) for seed in (0, 1))
    try:
        wanted = theirs(q, k, cos, sin)
        found = _rotate(theirs, q, k, cos, sin)
        same = torch.equal if like.device.type == "cpu" else _near
        return len(wanted) == 2 and all(a.dtype == b.dtype and same(a, b) for a, b in zip(wanted, found, strict=True))
    except Exception:  # of any kind: it is another function
        return False


def _near(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding: a GPU's compiler may fuse a product and a sum."""
    return closest([0], lambda _: b, a) is not None


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
