"""Torch's own operators as steps of a program, called by name from `kernels/program.h`.

Torch's C interface takes tensors, whole and real numbers, texts, devices, and lists of them. An operator that has any
other argument, as a ``Scalar``, is called through a function of Python, which takes 2 us more, if ``number_steps.py``
knows no other operators for it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError

DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
"""As torch numbers them."""
TENSOR, NUMBER, WHOLE, REAL, NONE, SOME, LIST, TEXT = range(8)  # kinds of Operand in program.h
CPU = 0xFFFFFFFF
"""The processor as torch's C interface takes a device: its type, 0, before its number, -1, of 32 bits each."""
_PLACES = {"device", "layout", "pin_memory", "generator"}
"""Arguments that say where a tensor lies, which is always the CPU's memory."""


class Operand(NamedTuple):
    """The operand of a step: the number of a value, or a constant."""

    kind: int
    value: int


Read = Callable[[Any, Any], Operand]
"""From a value of a graph and its constant (a tensor, number or text) or operand to what a step reads."""


def call_operands(schema: Any, inputs: Sequence[Any], known: Sequence[Any], read: Read) -> list[Operand]:
    """The arguments of an operator of torch that is called from C++.

    Args:
        schema: of the operator.
        inputs: values of a graph.
        known: the constant or operand of each.
        read: makes an operand of it.

    Raises:
        UnsupportedError: it cannot be called.
    """
    if not all(isinstance(made.type, torch._C.TensorType) for made in schema.returns):
        raise UnsupportedError(f"{schema.name}, which gives more than tensors")
    given = zip(schema.arguments, inputs, known, strict=True)
    return [part for argument, value, each in given for part in _argument(argument, value, each, read)]


def _argument(argument: Any, value: Any, known: Any, read: Read) -> Iterable[Operand]:
    if argument.name in _PLACES and isinstance(argument.type, torch._C.OptionalType):
        if str(known or "cpu") not in ("cpu", "0", "False"):
            raise UnsupportedError(f"a tensor elsewhere: {known}")
        return [Operand(NONE, 0)]
    return _packed(argument.type, value, known, read)


def each_of(value: Any, known: Any) -> Iterable[tuple[Any, Any]]:
    """A value of a graph with its constant or operand, or those of a list."""
    if not isinstance(known, list):
        return [(value, known)]
    parts = list(value.node().inputs())
    return zip(parts if len(parts) == len(known) else [value] * len(known), known, strict=True)


def _as_tensor(known: Any) -> Any:
    """A number where a tensor is expected, as a tensor without dimensions, as in torch."""
    if isinstance(known, bool):
        return torch.tensor(known)
    if isinstance(known, int | float):
        return torch.tensor(known, dtype=torch.int64 if isinstance(known, int) else torch.float64)
    return known


def _packed(kind: Any, value: Any, known: Any, read: Read) -> Iterable[Operand]:
    if isinstance(kind, torch._C.OptionalType):
        inner = kind.getElementType()
        return [Operand(NONE, 0)] if known is None else [Operand(SOME, 0), *_packed(inner, value, known, read)]
    if isinstance(kind, torch._C.ListType):
        if not isinstance(known, list):
            raise UnsupportedError("a list that is computed")
        parts = [part for pair in each_of(value, known) for part in _packed(kind.getElementType(), *pair, read)]
        return [Operand(LIST, len(known)), *parts]
    if isinstance(kind, torch._C.TensorType):
        known = _as_tensor(known)
    elif isinstance(known, Tensor) and not known.dim():
        known = known.item()
    elif isinstance(kind, torch._C.FloatType) and isinstance(known, int):
        known = float(known)
    elif isinstance(kind, torch._C.DeviceObjType) and str(known) == "cpu":
        known = CPU
    elif not isinstance(kind, torch._C.IntType | torch._C.FloatType | torch._C.BoolType | torch._C.StringType):
        raise UnsupportedError(f"an argument of type {kind}")
    made = read(value, known)
    if isinstance(kind, torch._C.TensorType) != (made.kind == TENSOR):
        raise UnsupportedError(f"an argument that is not of type {kind}")
    return [made]


# ---------------------------------------------------------------- through Python

_functions: dict[int, Callable[..., Any]] = {}
_numbers = itertools.count()


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("sakiyomi_python", "DEF")


@functools.cache
def _operator(kinds: str, returns: int) -> str:
    """The operator that calls one of ``_functions`` by number; its other arguments are tensors (T) or numbers (n)."""
    name = f"call_{kinds}_{returns}"
    given = "".join(f", {'Tensor' if kind == 'T' else 'int'} x{i}" for i, kind in enumerate(kinds))
    _library().define(f"{name}(int number{given}) -> ({', '.join(['Tensor'] * returns)})")
    _library().impl(name, lambda number, *given: _functions[number](*given), "CompositeExplicitAutograd")
    return f"sakiyomi_python::{name}"


class PythonFunction:
    """A function that steps call as long as this object lives.

    Args:
        run: returns a tensor, or several.
        given: its arguments, tensors and whole numbers.
        returns: number of tensors that it returns.

    Attributes:
        name: name of the operator that calls it.
        number: the first argument of the operator.
    """

    def __init__(self, run: Callable[..., Any], given: Sequence[Operand], returns: int) -> None:
        self.name = _operator("".join("T" if each.kind == TENSOR else "n" for each in given), returns)
        self.number = next(_numbers)

        def call(*given: Any) -> Any:
            found = run(*given)
            if isinstance(found, Tensor):
                return found
            return tuple(found) if returns > 1 else found[0]

        self._functions = _functions  # the module may be gone before this object, at the end of a process
        self._functions[self.number] = call

    def __del__(self) -> None:
        self._functions.pop(self.number, None)


def node_function(node: Any) -> Callable[[list[Any]], Any]:
    """The function of a node of a graph, from the list of its arguments to its result.

    Raises:
        UnsupportedError: it is no operator of torch or Python.
    """
    kind = node.kind()
    if kind == "prim::NumToTensor":
        return lambda given: torch.tensor(given[0])
    if kind == "aten::Int":
        return lambda given: int(given[0])
    if kind == "prim::PythonOp":
        function, constants, letters = node.pyobj(), node.scalar_args(), node.cconv()

        def call(given: list[Any]) -> Any:
            fixed, moving = iter(constants), iter(given)
            return function(*(next(fixed if letter == "c" else moving) for letter in letters))

        return call
    space, _, name = kind.partition("::")
    if space == "prim":
        raise UnsupportedError(kind)
    schema = torch._C.parse_schema(node.schema())
    operator = getattr(getattr(getattr(torch.ops, space), name), schema.overload_name or "default")
    named = [argument.name for argument in schema.arguments if argument.kwarg_only]
    count = len(schema.arguments) - len(named)  # which come last
    if not named:
        return lambda given: operator(*given)
    return lambda given: operator(*given[:count], **dict(zip(named, given[count:], strict=True)))
