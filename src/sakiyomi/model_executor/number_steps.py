"""Replaces operators of torch that take a ``Scalar`` by others with the same results, to the last bit.

Torch's C interface takes no ``Scalar``. It is replaced by a tensor without dimensions, of the dtype in which torch
computes with the number, so that no dtype changes. These are the operators that several architectures use; others
with a number are called through Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.step_list import StepList
from sakiyomi.model_executor.torch_steps import Operand

Way = Callable[[StepList, Any, list[Any]], Operand]


def without_number(steps: StepList, node: Any, given: list[Any]) -> Operand:
    """Add steps for an operator with a number among its arguments; their result.

    Args:
        steps: are added to.
        node: of a graph.
        given: its arguments: operands, and constants, which are tensors, numbers, or None.

    Raises:
        UnsupportedError: no replacement is known for it.
    """
    name = node.schema().partition("(")[0]
    if name not in _WAYS:
        raise UnsupportedError(f"{name}, for which no replacement is known")
    return _WAYS[name](steps, node, given)


def _dtype(node: Any) -> torch.dtype:
    """The type of the first argument, which a trace knows and a file does not."""
    found: torch.dtype | None = next(iter(node.inputs())).type().dtype()
    if found is None:
        raise UnsupportedError(f"{node.kind()} of an unknown type")
    return found


def _beside(number: Any, dtype: torch.dtype) -> Tensor:
    """A number as torch takes it beside a tensor of this type."""
    if not isinstance(number, bool | int | float):
        raise UnsupportedError("a number that is computed")
    return torch.tensor(number, dtype=torch.result_type(torch.empty(1, dtype=dtype), number))


def _as_tensor(name: str, number: int) -> Way:
    """An operator whose overload "Tensor" takes a tensor in the place of the number at this place."""

    def way(steps: StepList, node: Any, given: list[Any]) -> Operand:
        fixed = _beside(given[number], _dtype(node))
        arguments = [*given[:number], fixed, *given[number + 1 :]]
        operands = [steps.constant(each) if isinstance(each, Tensor) else steps.operand(each) for each in arguments]
        return steps.call(name, "Tensor", 1, operands)[0]

    return way


def _clamped(*names: str) -> Way:
    """Bounds, one after the other, by these steps of the kernels."""

    def way(steps: StepList, node: Any, given: list[Any]) -> Operand:
        dtype, made = _dtype(node), steps.operand(given[0])
        bounds = [(name, bound) for name, bound in zip(names, given[1:], strict=True) if bound is not None]
        # With the bound 0 the sign of the result depends on the layout of the numbers.
        if any(bound == 0 or _beside(bound, dtype).dtype != dtype for _, bound in bounds):
            raise UnsupportedError("a bound of another type, or 0")
        for name, bound in bounds:
            made = steps.emit(name, made, steps.operand(bound))
        return made

    return way


_ROOTS = {0.5: "aten::sqrt", -0.5: "aten::rsqrt", -1: "aten::reciprocal"}


def _power(steps: StepList, node: Any, given: list[Any]) -> Operand:
    """Powers as torch computes them, which differs for float16."""
    base, exponent = given
    half = next(iter(node.inputs())).type().dtype() == torch.float16  # of a file it is not
    if not isinstance(base, Operand) or not isinstance(exponent, int | float):
        raise UnsupportedError("a power that is computed")
    if exponent == 2:
        return steps.emit("mul", base, base)
    if exponent == 3 and not half:
        return steps.emit("mul", steps.emit("mul", base, base), base)
    if exponent in _ROOTS and _dtype(node) in (torch.float32, torch.float64, torch.bfloat16):
        return steps.call(_ROOTS[exponent], "", 1, [base])[0]
    raise UnsupportedError(f"a number to the power of {exponent}")


def _scattered(steps: StepList, node: Any, given: list[Any]) -> Operand:
    """The number in every place of a tensor with the shape of the index."""
    into, along, index, number = given
    _beside(number, dtype := _dtype(node))
    fixed, index = steps.constant(torch.tensor(number, dtype=dtype)), steps.operand(index)
    source = steps.call("aten::expand_as", "", 1, [fixed, index])[0]
    steps.share(fixed.value, source.value)
    return steps.call(node.kind(), "src", 1, [steps.operand(into), steps.operand(along), index, source])[0]


_WAYS: Mapping[str, Way] = {
    **{
        f"aten::{name}.Scalar": _as_tensor(f"aten::{name}", at)
        for at, names in ((1, ("gt", "ge", "lt", "le", "eq", "ne")), (2, ("masked_fill", "masked_fill_")))
        for name in names
    },
    "aten::clamp": _clamped("clamp_min", "clamp_max"),
    "aten::clamp_min": _clamped("clamp_min"),
    "aten::clamp_max": _clamped("clamp_max"),
    "aten::pow.Tensor_Scalar": _power,
    "aten::scatter.value": _scattered,
    "aten::scatter_.value": _scattered,
}
