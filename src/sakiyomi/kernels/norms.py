"""A model's root mean square norms by a kernel of the CPU or the GPU: one call instead of a dozen calls of torch.

Modules are tested on random rows: only those with the results of a known form are replaced.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sakiyomi.core.hooks import unchanged
from sakiyomi.kernels.device import operators
from sakiyomi.kernels.native import DTYPES

Kind = TypeVar("Kind")
PLUS_ONE, ROUNDED_EARLY, GATE_FIRST = 1, 2, 4  # as in norms.h
ROWS = 4  # of a trial


def serve_norms(model: nn.Module) -> int:
    """Have norms of a model call the kernels of its device; returns the number of such modules.

    Modules with hooks, or with their own forward, stay as they are.

    Args:
        model: changed in place; hooks that are added later are called.
    """
    served, known = 0, dict[Any, int | None]()
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(eps, float) or not _plain(module):
            continue
        weight: Tensor = module.weight  # type: ignore[assignment]
        key = type(module), eps, weight.shape, weight.dtype
        if key not in known:
            known[key] = _form(module, eps)
        if (form := known[key]) is not None:
            module.forward = functools.partial(_norm, module, eps, form)
            served += 1
    return served


def _plain(module: nn.Module) -> bool:
    """Whether it is an unchanged module of one vector."""
    own = module._parameters
    if own.keys() != {"weight"} or module._modules or module._buffers or not unchanged(module):
        return False
    weight = own["weight"]
    if type(weight) is not nn.Parameter or weight.ndim != 1 or weight.numel() < 2 or weight.dtype not in DTYPES:
        return False
    return weight.device.type in ("cpu", "cuda") and operators(weight.device) is not None


def _norm(module: Any, eps: float, form: int, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    dtype = hidden_states.dtype
    if gate is not None and dtype == torch.float32:
        gate = gate.to(dtype)
    rows = [hidden_states] if gate is None else [hidden_states, gate]
    # With other pairs of dtypes the result has another dtype than the rows.
    if dtype not in (module.weight.dtype, torch.float32) or (gate is not None and gate.dtype != dtype):
        return type(module).forward(module, *rows)  # type: ignore[no-any-return]
    return operators(module.weight.device).norm(rows, module.weight, eps, form)  # type: ignore[no-any-return]


@torch.no_grad()
def _form(module: nn.Module, eps: float) -> int | None:
    """The form with the results of the module, up to the order of a sum; None: there is none."""
    trial = copy.deepcopy(module)
    weight: Any = trial.weight
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    weight.copy_(random(*weight.shape))
    gated = len(inspect.signature(type(module).forward).parameters) > 2
    rows = [scale * random(1, 2, ROWS, len(weight)) for scale in (3, 1)[: 1 + gated]]
    try:
        wanted, flat = trial(*rows), trial(*[each.flatten(0, 2) for each in rows])
    except Exception:  # of any kind: it is none of these norms
        return None
    if not isinstance(wanted, Tensor) or wanted.shape != rows[0].shape or wanted.dtype != weight.dtype:
        return None
    if not torch.equal(wanted.flatten(0, 2), flat):  # rows depend on each other
        return None
    forms = [early | one | first for first in (0, GATE_FIRST)[: 1 + gated] for one in (0, PLUS_ONE) for early in (2, 0)]
    return closest(forms, lambda form: _norm(trial, eps, form, *rows), wanted)


def closest(kinds: Iterable[Kind], compute: Callable[[Kind], Tensor], wanted: Tensor) -> Kind | None:
    """The kind of a computation with the wanted results, up to the order of a sum; None: there is none."""
    errors = {kind: float((compute(kind) - wanted).abs().float().mean()) for kind in kinds}
    best = min(errors, key=errors.__getitem__)
    # In bfloat16 only a few numbers may be rounded differently: another kind differs by 0.001 on average.
    bound = 1e-6 if wanted.dtype == torch.float32 else 1e-4
    return best if errors[best] <= bound * float(wanted.float().abs().mean()) else None
