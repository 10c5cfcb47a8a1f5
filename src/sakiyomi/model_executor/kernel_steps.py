"""By operator of a traced pass: the step of the kernels that replaces it, and the order of the step's operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.torch_steps import each_of

Pair = tuple[Any, Any]  # a value of the graph, and its constant or operand
Order = Callable[[list[Any], list[Any]], Iterable[Pair] | None]


def _all(inputs: list[Any], known: list[Any]) -> Iterable[Pair]:
    for value, each in zip(inputs, known, strict=True):
        yield from each_of(value, each)


def _norm(inputs: list[Any], known: list[Any]) -> Iterable[Pair]:
    if not isinstance(known[1], Tensor):
        raise UnsupportedError("a norm by a weight that is computed")
    return [(inputs[1], known[1].float()), *zip(inputs[2:], known[2:], strict=True), *each_of(inputs[0], known[0])]


def _recur(inputs: list[Any], known: list[Any]) -> Iterable[Pair]:
    rows, fixed = list(each_of(inputs[0], known[0])), known[1]
    if not all(isinstance(tensor, Tensor) for tensor in fixed):
        raise UnsupportedError("a recurrence by weights that are computed")
    return [(inputs[2], known[2]), (None, len(rows)), *rows, *((None, tensor.float()) for tensor in fixed)]


def _embedding(inputs: list[Any], known: list[Any]) -> Iterable[Pair]:
    table = known[0].contiguous() if isinstance(known[0], Tensor) else known[0]
    return [(inputs[0], table), (inputs[1], known[1])]


def _first(count: int, *wanted: Any) -> Order:
    """The first inputs, if the further inputs are these constants; the kernels have no step for others."""

    def order(inputs: list[Any], known: list[Any]) -> Iterable[Pair] | None:
        return _all(inputs[:count], known[:count]) if tuple(known[count:]) == wanted else None

    return order


def _sum(inputs: list[Any], known: list[Any]) -> Iterable[Pair] | None:
    """The kernels have no step for sums of whole numbers, which torch's C interface lacks."""
    found = [value.type().dtype() if isinstance(value.type(), torch._C.TensorType) else None for value in inputs[:2]]
    if found[0] is not None and not any(dtype is not None and dtype.is_floating_point for dtype in found):
        return None
    return _first(2, 1)(inputs, known)


KERNEL_STEPS: Mapping[str, tuple[str, Order]] = {
    **{
        f"sakiyomi_cpu::{name}": (name, _all)
        for name in ("linear", "experts", "attend", "cross", "gated", "rotate", "look_up")
    },
    "sakiyomi_cpu::norm": ("norm", _norm),
    "sakiyomi_cpu::recur": ("recur", _recur),
    "aten::embedding": ("rows", _embedding),
    "aten::view": ("view", _all),
    "aten::reshape": ("view", _all),
    "aten::transpose": ("transpose", _all),
    "aten::unsqueeze": ("unsqueeze", _all),
    "aten::slice": ("slice", _first(4, 1)),
    "aten::contiguous": ("contiguous", _first(1, 0)),
    **{f"aten::{name}": (name.rstrip("_"), _sum) for name in ("add", "add_", "sub", "sub_")},
    **{f"aten::{name}": (name.rstrip("_"), _first(2)) for name in ("mul", "mul_", "div", "div_")},
}
