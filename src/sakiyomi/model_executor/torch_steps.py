"""Torch's own operators as steps of a program: what `kernels/program.h` calls by name, with their arguments.

Its C interface takes no ``Scalar``; an operator with one is called by the overload that takes a tensor in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from sakiyomi.core.errors import UnsupportedError

__all__ = [
    "DTYPES", "NUMBER", "REAL", "REWRITES", "TENSOR", "TEXT", "WHOLE", "Operand", "Steps", "TorchCall",
    "as_tensor", "each_of", "torch_call",
]  # fmt: skip

DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
"""As torch numbers them."""
TENSOR, NUMBER, WHOLE, REAL, NONE, SOME, LIST, TEXT = range(8)  # kinds of Operand in program.h
WRAPPED = {"eq", "ne", "lt", "le", "gt", "ge"} | {"clamp", "clamp_min", "clamp_max", "masked_fill", "masked_fill_"}
"""Operators with a number that torch computes as those with a tensor of one number in its place."""
_PLACES = {"device", "layout", "pin_memory", "generator"}
"""Arguments that say where a tensor lies, which is the CPU's memory in any case."""


class Operand(NamedTuple):
    """What a step reads: the number of a value, or a constant."""

    kind: int
    value: int


class TorchCall(NamedTuple):
    """An operator of torch with its arguments.

    Attributes:
        name, overload: of it.
        returns: how many tensors it gives.
        arguments: kinds of operands, each with a number or a text; those of ``TENSOR`` and ``NUMBER``, which is any
            number here, with a value of the graph and what is known of it.
        views: its result may lie in the memory of its first argument.
        writes: into its first argument.
    """

    name: str
    overload: str
    returns: int
    arguments: list[tuple[int, Any]]
    views: bool
    writes: bool


def torch_call(node: Any, inputs: Sequence[Any], known: Sequence[Any]) -> TorchCall:
    """How a node of a graph is called from C++.

    Args:
        node: of a graph.
        inputs: its values.
        known: what is known of them.

    Raises:
        UnsupportedError: it cannot be called.
    """
    name = node.kind()
    if not name.startswith("aten::"):
        raise UnsupportedError(name)
    schema = torch._C.parse_schema(node.schema())
    given = list(zip(schema.arguments, inputs, known, strict=True))
    if name == "aten::to" and schema.overload_name in ("device", "dtype_layout"):
        schema, given = _moved(given)
    elif any(_is_number(argument.type) for argument, *_ in given):
        schema = _of_tensors(schema)
        given = [(argument, *each[1:]) for argument, each in zip(schema.arguments, given, strict=True)]
    if not all(isinstance(made.type, torch._C.TensorType) for made in schema.returns):
        raise UnsupportedError(f"{name}, which gives more than tensors")
    first = schema.arguments[0].alias_info if schema.arguments else None
    views = any(made.alias_info is not None for made in schema.returns)
    arguments = [part for each in given for part in _argument(*each)]
    writes = first is not None and first.is_write
    return TorchCall(name, schema.overload_name, len(schema.returns), arguments, views, writes)


def _is_number(kind: Any) -> bool:
    """Whether it is a ``Scalar``, or one that need not be there."""
    inner = kind.getElementType() if isinstance(kind, torch._C.OptionalType) else kind
    return isinstance(inner, torch._C.NumberType)


def _of_tensors(schema: Any) -> Any:
    """The overload of an operator that takes tensors where this one takes numbers."""
    _, _, name = schema.name.partition("::")
    if name not in WRAPPED:
        raise UnsupportedError(f"{schema.name} with a number")
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        other = torch._C.parse_schema(str(getattr(packet, overload)._schema))
        if len(other.arguments) == len(schema.arguments) and all(map(_replaces, other.arguments, schema.arguments)):
            return other
    raise UnsupportedError(f"{schema.name} with a number")


def _replaces(other: Any, argument: Any) -> bool:
    if other.name != argument.name:
        return False
    return "Tensor" in str(other.type) if _is_number(argument.type) else str(other.type) == str(argument.type)


def _moved(given: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A conversion to a type on the CPU, where everything is."""
    schema = torch._C.parse_schema(str(torch.ops.aten.to.dtype._schema))
    found = {argument.name: (value, known) for argument, value, known in given}
    if found["dtype"][1] is None or str(found["device"][1] or "cpu") != "cpu":
        raise UnsupportedError("aten::to another device")
    return schema, [(argument, *found[argument.name]) for argument in schema.arguments]


def _argument(argument: Any, value: Any, known: Any) -> Iterable[tuple[int, Any]]:
    if argument.name in _PLACES:
        if str(known or "cpu") not in ("cpu", "0", "False"):
            raise UnsupportedError(f"a tensor elsewhere: {known}")
        return [(NONE, 0)]
    return _packed(argument.type, value, known)


def each_of(value: Any, known: Any) -> Iterable[tuple[Any, Any]]:
    """A value of a graph with what is known of it, or those of a list."""
    if not isinstance(known, list):
        return [(value, known)]
    parts = list(value.node().inputs())
    return zip(parts if len(parts) == len(known) else [value] * len(known), known, strict=True)


def as_tensor(known: Any) -> Any:
    """What is given for a tensor; numbers become one without dimensions, as torch makes of them."""
    if isinstance(known, bool):
        return torch.tensor(known)
    if isinstance(known, int | float):
        return torch.tensor(known, dtype=torch.int64 if isinstance(known, int) else torch.float64)
    return known


def _packed(kind: Any, value: Any, known: Any) -> Iterable[tuple[int, Any]]:
    if isinstance(kind, torch._C.OptionalType):
        return [(NONE, 0)] if known is None else [(SOME, 0), *_packed(kind.getElementType(), value, known)]
    if isinstance(kind, torch._C.ListType):
        if not isinstance(known, list):
            raise UnsupportedError("a list that is computed")
        inner = kind.getElementType()
        return [(LIST, len(known)), *(part for pair in each_of(value, known) for part in _packed(inner, *pair))]
    if isinstance(kind, torch._C.StringType):
        return [(TEXT, known)]
    if isinstance(kind, torch._C.TensorType):
        return [(TENSOR, (value, as_tensor(known)))]
    if isinstance(kind, torch._C.FloatType) and isinstance(known, int):
        return [(NUMBER, (value, float(known)))]
    if isinstance(kind, torch._C.IntType | torch._C.FloatType | torch._C.BoolType):
        return [(NUMBER, (value, known))]
    raise UnsupportedError(f"an argument of type {kind}")


# ---------------------------------------------------------------- operators with numbers that have no such overload


class Steps(Protocol):
    """What makes steps."""

    def emit(self, name: str, *given: tuple[int, int]) -> Operand:
        """A step of the kernels; what it makes."""

    def call(self, name: str, *given: Operand | float, overload: str = "", writes: bool = False) -> Operand:
        """An operator of torch that gives one tensor; numbers of Python become tensors without dimensions."""


def _power(steps: Steps, x: Operand, exponent: Any) -> Operand:
    if exponent in (2, 3):  # as torch computes them
        square = steps.emit("mul", x, x)
        return square if exponent == 2 else steps.emit("mul", square, x)
    name = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    if name is None:
        raise UnsupportedError(f"the power {exponent}")
    return steps.call(f"aten::{name}", x)


def _scatter(name: str, steps: Steps, x: Operand, dimension: Any, index: Any, value: Any) -> Operand | None:
    if not isinstance(value, int | float) or not isinstance(index, Operand) or not isinstance(dimension, int):
        return None
    along = Operand(WHOLE, dimension)
    found = steps.call("aten::gather", x, along, index, Operand(WHOLE, 0))
    found = steps.call("aten::fill_", found, float(value), overload="Tensor", writes=True)
    return steps.call(name, x, along, index, found, overload="src", writes=name.endswith("_"))


def _full_like(
    steps: Steps, x: Operand, value: Any, dtype: Any, layout: Any, device: Any, pinned: Any, order: Any
) -> Operand | None:
    if not isinstance(value, int | float) or dtype is not None or order is not None or str(device or "cpu") != "cpu":
        return None
    made = steps.call("aten::zeros_like", x, *[Operand(NONE, 0)] * 5)
    return steps.call("aten::fill_", made, float(value), overload="Tensor", writes=True)


REWRITES: dict[str, Callable[..., Operand | None]] = {
    "aten::pow": _power,
    "aten::scatter": functools.partial(_scatter, "aten::scatter"),
    "aten::scatter_": functools.partial(_scatter, "aten::scatter_"),
    "aten::full_like": _full_like,
}
"""What makes steps of an operator, from its first argument and what is known of the others; None: it does not."""
