"""Translates the operators of a traced pass into the steps of a program.

Operators that the kernels have are theirs; all others are torch's, called by name (``torch_steps.py``).
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.torch_steps import (
    DTYPES,
    NUMBER,
    REAL,
    TENSOR,
    TEXT,
    WHOLE,
    Operand,
    PythonFunction,
    each_of,
    node_function,
    torch_call,
)

OPERATORS = (
    "linear", "experts", "attend", "cross", "recur", "norm", "gated", "rotate", "rows", "kept", "size", "view",
    "transpose", "unsqueeze", "slice", "part", "contiguous", "add", "sub", "mul", "div", "whole", "torch",
)  # fmt: skip
"""In the order of Op in program.h."""
ARITHMETIC = ("aten::add", "aten::sub", "aten::mul", "aten::floor_divide")
"""Of whole numbers, in the order of Arithmetic in program.h."""
VIEWS = {"kept", "view", "transpose", "unsqueeze", "slice", "part", "contiguous"}
"""Steps whose results may lie in the memory of what they are given."""
COUNTING = {"size", "whole"}
"""Steps that make a whole number."""
IDS, POSITIONS, KEEP = range(3)  # the first values
_ALIKE = (
    "prim::NumToTensor", "aten::Int", "aten::IntImplicit", "aten::ScalarImplicit", "aten::dropout", "aten::detach",
)  # fmt: skip
"""Operators that give what they are given."""


class _OfPositions:
    """A value that follows from positions alone, which torch computes."""


class _KeptRows:
    """The numbers of the rows that a pass is asked for."""


class Builder:
    """The steps of a graph.

    Args:
        graph, given: see ``Program``.

    Attributes:
        code: of the steps, as `sk_program` takes them.
        count: of values.
        constants: tensors that are the same in all passes, by their values.
        tables: what makes those of so many positions, with their values.
        texts: that steps name.
        functions: of Python that steps call.
        outputs: of the graph, as steps read them.

    Raises:
        UnsupportedError: an operator can be called neither by the kernels nor by Python.
    """

    def __init__(self, graph: Any, given: Sequence[Tensor]) -> None:
        self.code: list[int] = []
        self.count = 3
        self.constants: dict[int, Tensor] = {}
        self.tables: list[tuple[int, Callable[[int], Tensor]]] = []
        self.texts: list[str] = []
        self.functions: list[PythonFunction] = []
        self._graph = graph  # its nodes are read later, too
        self._lasting = {IDS, POSITIONS, KEEP}  # values in memory that other passes read, too
        self._shared: set[int] = set()  # in that of another value
        self._held = {tensor.untyped_storage().data_ptr() for tensor in given}  # memory that the model holds
        self._known: dict[int, Any] = {}
        self._looked_up: dict[int, int] = {}
        inputs = [value for value in graph.inputs() if isinstance(value.type(), torch._C.TensorType)]
        keeping = [_KeptRows()] * (len(inputs) - len(given) - 2)
        known = [Operand(TENSOR, IDS), _OfPositions(), *keeping, *given]
        self._known |= {value.unique(): each for value, each in zip(inputs, known, strict=True)}
        self._positions = inputs[POSITIONS]
        self._looked_up[self._positions.unique()] = POSITIONS
        for value in graph.inputs():
            self._known.setdefault(value.unique(), None)  # the script itself
        with torch.no_grad():
            for node in graph.nodes():
                self._take(node)
        values = [value for output in graph.outputs() for value in leaves(output)]
        self.outputs = [self._operand(value, self._known[value.unique()]) for value in values]

    # ------------------------------------------------------------ values

    def _fixed(self, tensor: Tensor) -> Operand:
        """A tensor that is the same in all passes."""
        self.count += 1
        if tensor.dtype not in DTYPES:
            raise UnsupportedError(f"a tensor of {tensor.dtype}")
        self.constants[self.count - 1] = tensor.detach()
        self._lasting.add(self.count - 1)
        return Operand(TENSOR, self.count - 1)

    def _operand(self, value: Any, known: Any) -> Operand:
        if isinstance(known, Operand):
            return known
        if isinstance(known, _OfPositions):
            return self._at_positions(value)
        if isinstance(known, Tensor):
            if known.dim():
                return self._fixed(known)
            known = known.item()
        if isinstance(known, bool | int):
            return Operand(WHOLE, int(known))
        if isinstance(known, float):
            return Operand(REAL, _bits(known))
        raise UnsupportedError(f"a step that reads {type(known).__name__}")

    def emit(self, name: str, *given: tuple[int, int]) -> Operand:
        """A step; what it makes."""
        self.count += 1
        self.code += [OPERATORS.index(name), self.count - 1, len(given), *(x for operand in given for x in operand)]
        if name in VIEWS:
            self._share(given[0][1], self.count - 1)
        return Operand(NUMBER if name in COUNTING else TENSOR, self.count - 1)

    def _share(self, value: int, view: int) -> None:
        self._shared |= {value, view}
        if value in self._lasting:
            self._lasting.add(view)

    # ------------------------------------------------------------ what follows from positions alone

    def _at_positions(self, value: Any) -> Operand:
        """Looked up, or, where it has no row for each position, computed in each pass."""
        try:
            return Operand(TENSOR, self._look_up(value))
        except UnsupportedError:
            node = value.node()
            inputs = list(node.inputs())
            found = self._called(node, inputs, [self._known[each.unique()] for each in inputs])
            self._known |= {each.unique(): made for each, made in zip(node.outputs(), found, strict=True)}
            return self._operand(value, self._known[value.unique()])

    def _look_up(self, value: Any) -> int:
        """Rows of a table, of the pass's positions."""
        if value.unique() not in self._looked_up:
            compute = functools.partial(self._computed, self._known, value)
            few, more = compute(torch.arange(5)), compute(torch.arange(7))
            places = [d for d, (a, b) in enumerate(zip(few.shape, more.shape, strict=True)) if a != b]
            if len(places) != 1 or more.shape[places[0]] != 7 or more.shape[: places[0]].numel() != 1:
                raise UnsupportedError("what follows from positions has no row for each")
            at = places[0]

            def table(count: int) -> Tensor:
                return compute(torch.arange(count)).flatten(0, at)

            whole, turned = table(64), compute(torch.arange(64).flip(0)).flatten(0, at)
            alone = compute(torch.tensor([3])).flatten(0, at)
            if not torch.equal(whole.flip(0), turned) or not torch.equal(whole[3:4], alone):
                raise UnsupportedError("what follows from a position depends on the others")
            self.count += 1
            self.tables.append((self.count - 1, table))
            found = self.emit("rows", (TENSOR, self.count - 1), (TENSOR, POSITIONS))  # (1, N, ...)
            if at != 1:
                sizes = [(WHOLE, size) for size in (*(1,) * at, -1, *more.shape[at + 1 :])]
                found = self.emit("view", found, *sizes)
            self._looked_up[value.unique()] = found.value
        return self._looked_up[value.unique()]

    def _computed(self, values: Mapping[int, Any], value: Any, positions: Tensor) -> Tensor:
        """A value that follows from positions (N) alone."""
        known: dict[int, Any] = {self._positions.unique(): positions[None]}

        def find(each: Any) -> Any:
            held = values[each.unique()]
            if not isinstance(held, _OfPositions):
                return [find(part) for part in each.node().inputs()] if isinstance(held, list) else held
            if each.unique() not in known:
                known[each.unique()] = node_function(each.node())([find(part) for part in each.node().inputs()])
            return known[each.unique()]

        with torch.no_grad():
            found: Tensor = find(value)
        return found

    # ------------------------------------------------------------ nodes

    def _take(self, node: Any) -> None:
        kind, inputs = node.kind(), list(node.inputs())
        known = [self._known[value.unique()] for value in inputs]
        if kind == "prim::ListUnpack" and isinstance(known[0], list):
            self._known |= {value.unique(): each for value, each in zip(node.outputs(), known[0], strict=True)}
        elif node.outputsSize() == 1:
            self._known[node.output().unique()] = self._made(node, kind, inputs, known)
        else:
            found = zip(node.outputs(), self._called(node, inputs, known), strict=True)
            self._known |= {value.unique(): each for value, each in found}

    def _made(self, node: Any, kind: str, inputs: list[Any], known: list[Any]) -> Any:
        if kind == "prim::Constant":
            found = node.output().toIValue()
            if isinstance(found, Tensor):
                self._held.add(found.untyped_storage().data_ptr())
            return found
        moving = [each for each in _flat(known) if isinstance(each, Operand | _OfPositions | _KeptRows)]
        if kind in ("prim::ListConstruct", "prim::TupleConstruct"):
            return known
        if not moving:
            if _aliases(node) == "written" and known[0].untyped_storage().data_ptr() in self._held:
                raise UnsupportedError(f"{kind} of what other passes read")
            return node_function(node)(known)
        if kind in _ALIKE and isinstance(known[0], Operand) and (kind != "aten::dropout" or not known[2]):
            return known[0]
        if kind == "aten::size" and len(known) == 2:
            return self.emit("size", *self._operands(zip(inputs, known, strict=True)))
        listed = isinstance(node.output().type(), torch._C.ListType)
        if not listed and all(isinstance(each, _OfPositions) for each in moving):
            return _OfPositions()
        if kind == "aten::index" and isinstance(known[0], Operand):
            kept = [d for d, each in enumerate(known[1]) if isinstance(each, _KeptRows)]
            if len(kept) == 1 and sum(each is None for each in known[1]) == len(known[1]) - 1:
                return self.emit("kept", known[0], Operand(WHOLE, kept[0]))
        if kind in ("aten::chunk", "aten::split", "aten::split_with_sizes"):
            return self._parts(node, self._operand(inputs[0], known[0]), *known[1:])
        if kind in ARITHMETIC and all(map(_is_whole, known[:2])):
            return self._counted(kind, *self._operands(zip(inputs[:2], known[:2], strict=True)))
        if kind == "aten::neg" and _is_whole(known[0]):
            return self._counted("aten::sub", Operand(WHOLE, 0), self._operand(inputs[0], known[0]))
        if kind == "aten::pow" and isinstance(known[0], Operand) and len(moving) == 1 and known[1] in (2, 3):
            square = self.emit("mul", known[0], known[0])  # as torch computes it, but for cubes in float16
            if known[1] == 2:
                return square
            if inputs[0].type().scalarType() != "Half":
                return self.emit("mul", square, known[0])
        if (found := self._step(kind, inputs, known)) is not None:
            return found
        made = self._called(node, inputs, known)
        return made if listed else made[0]

    def _operands(self, pairs: Iterable[Pair]) -> list[Operand]:
        return [self._operand(value, known) for value, known in pairs]

    def _counted(self, kind: str, *given: Operand) -> Operand:
        """Arithmetic of whole numbers."""
        return self.emit("whole", (WHOLE, ARITHMETIC.index(kind)), *given)

    def _step(self, kind: str, inputs: list[Any], known: list[Any]) -> Operand | None:
        """A step of the kernels; None: they have none for it."""
        if kind not in _STEPS:
            return None
        name, order = _STEPS[kind]
        pairs = order(inputs, known)
        if pairs is None:
            return None
        operands = self._operands(pairs)
        if kind.endswith("_") and (operands[0] != known[0] or operands[0].value in self._shared):
            return None  # the step makes another tensor, and others read this one
        return self.emit(name, *operands)

    def _called(self, node: Any, inputs: list[Any], known: list[Any]) -> list[Operand]:
        """What an operator of torch gives, which the kernels call by name or through Python."""
        aliases = _aliases(node)
        written = known[0] if aliases == "written" else None
        if aliases == "written" and (not isinstance(written, Operand) or written.value in self._lasting):
            raise UnsupportedError(f"{node.kind()} of what other passes read")
        try:
            found, given = self._by_name(node, inputs, known)
        except UnsupportedError:
            found, given = self._through_python(node, inputs, known)
        if aliases == "viewed":
            for operand, made in itertools.product(given, found):
                self._share(operand.value, made.value)
        return found

    def _by_name(self, node: Any, inputs: list[Any], known: list[Any]) -> tuple[list[Operand], list[Operand]]:
        """What an operator gives that is called from C++, and the tensors that it is given."""
        call = torch_call(node, inputs, known)
        operands = []
        for kind, each in call.arguments:
            if kind == TEXT:
                operands.append(self._text(each))
            elif kind in (TENSOR, NUMBER):
                value, found = each
                whole = kind == TENSOR and isinstance(found, Tensor)
                operands.append(self._fixed(found) if whole else self._operand(value, found))
                if (kind == TENSOR) != (operands[-1].kind == TENSOR):
                    raise UnsupportedError(f"{call.name} with an argument of another type")
            else:
                operands.append(Operand(kind, each))
        made = self._torch(call.name, call.overload, call.returns, operands)
        return made, [each for each in operands if each.kind == TENSOR]

    def _through_python(self, node: Any, inputs: list[Any], known: list[Any]) -> tuple[list[Operand], list[Operand]]:
        """The same of any other operator."""
        arguments = [self._held_by_python(*pair) for pair in zip(inputs, known, strict=True)]
        moving = [each for each in _flat(arguments) if isinstance(each, Operand)]
        compute = node_function(node)

        def run(*given: Any) -> Any:
            return compute(_filled(arguments, iter(given)))

        outputs = list(node.outputs())
        returns = _list_size(node) if isinstance(outputs[0].type(), torch._C.ListType) else len(outputs)
        if not all(isinstance(each.type(), torch._C.TensorType | torch._C.ListType) for each in outputs):
            raise UnsupportedError(f"{node.kind()}, which gives more than tensors")
        function = PythonFunction(run, moving, returns)
        self.functions.append(function)
        made = self._torch(function.name, "", returns, [Operand(WHOLE, function.number), *moving])
        return made, [each for each in moving if each.kind == TENSOR]

    def _held_by_python(self, value: Any, known: Any) -> Any:
        """An argument with operands in the place of what differs from pass to pass."""
        if isinstance(known, list):
            return [self._held_by_python(*pair) for pair in each_of(value, known)]
        if isinstance(known, _KeptRows):
            raise UnsupportedError("an operator of the rows that a pass is asked for")
        return self._operand(value, known) if isinstance(known, Operand | _OfPositions) else known

    def _torch(self, name: str, overload: str, returns: int, given: list[Operand]) -> list[Operand]:
        head = self._text(name), self._text(overload), Operand(WHOLE, returns)
        first = self.emit("torch", *head, *given).value
        self.count += returns - 1
        return [Operand(TENSOR, first + i) for i in range(returns)]

    def _text(self, text: str) -> Operand:
        if text not in self.texts:
            self.texts.append(text)
        return Operand(TEXT, self.texts.index(text))

    def _parts(self, node: Any, whole: Operand, sizes: Any, dimension: Any) -> list[Operand]:
        """A tensor cut along a dimension: into so many equal parts, or into those of these sizes."""
        kind, along = node.kind(), Operand(WHOLE, dimension)
        if kind == "aten::chunk":
            cuts = [("part", whole, along, Operand(WHOLE, sizes), Operand(WHOLE, i)) for i in range(sizes)]
        else:
            if isinstance(sizes, int):
                sizes = [sizes] * _list_size(node)
            ends = [Operand(WHOLE, 0)]
            for size in sizes:
                ends.append(self._after(ends[-1], size))
            cuts = [("slice", whole, along, *pair) for pair in itertools.pairwise(ends)]
        return [self.emit(name, *given) for name, *given in cuts]

    def _after(self, end: Operand, size: Any) -> Operand:
        """A place so much further."""
        if isinstance(size, int) and end.kind == WHOLE:
            return Operand(WHOLE, end.value + size)
        return self._counted("aten::add", end, size if isinstance(size, Operand) else Operand(WHOLE, size))


# ---------------------------------------------------------------- which step an operator becomes, and what that reads

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
    """The first inputs; with others behind them than these it is not the kernels'."""

    def order(inputs: list[Any], known: list[Any]) -> Iterable[Pair] | None:
        return _all(inputs[:count], known[:count]) if tuple(known[count:]) == wanted else None

    return order


_STEPS: Mapping[str, tuple[str, Order]] = {
    **{f"sakiyomi_cpu::{name}": (name, _all) for name in ("linear", "experts", "attend", "cross", "gated", "rotate")},
    "sakiyomi_cpu::norm": ("norm", _norm),
    "sakiyomi_cpu::recur": ("recur", _recur),
    "aten::embedding": ("rows", _embedding),
    "aten::view": ("view", _all),
    "aten::reshape": ("view", _all),
    "aten::transpose": ("transpose", _all),
    "aten::unsqueeze": ("unsqueeze", _all),
    "aten::slice": ("slice", _first(4, 1)),
    "aten::contiguous": ("contiguous", _first(1, 0)),
    **{f"aten::{name}": (name.rstrip("_"), _first(2, 1)) for name in ("add", "add_", "sub", "sub_")},
    **{f"aten::{name}": (name.rstrip("_"), _first(2)) for name in ("mul", "mul_", "div", "div_")},
}


def _is_whole(known: Any) -> bool:
    """Whether it is a whole number, or one that a pass computes."""
    if isinstance(known, Tensor):
        return not known.dim() and not known.is_floating_point()
    return known.kind == NUMBER if isinstance(known, Operand) else isinstance(known, int)


def _flat(known: Any) -> Iterable[Any]:
    if isinstance(known, list):
        for each in known:
            yield from _flat(each)
    else:
        yield known


def _filled(arguments: list[Any], given: Iterator[Any]) -> list[Any]:
    """Arguments with what is given, one after the other, in the place of their operands."""
    return [
        _filled(each, given) if isinstance(each, list) else next(given) if isinstance(each, Operand) else each
        for each in arguments
    ]


def _bits(number: float) -> int:
    return int(struct.unpack("=q", struct.pack("=d", number))[0])


def _aliases(node: Any) -> str:
    """Whether what an operator gives may lie in memory that it is given ("viewed"), or is written there ("written")."""
    if node.kind().startswith("prim::"):
        return "viewed"
    schema = torch._C.parse_schema(node.schema())
    first = schema.arguments[0].alias_info if schema.arguments else None
    if first is not None and first.is_write:
        return "written"
    return "viewed" if any(made.alias_info is not None for made in schema.returns) else ""


def _list_size(node: Any) -> int:
    """How many parts the list has that an operator gives.

    Raises:
        UnsupportedError: nothing says so.
    """
    sizes = [use.user.outputsSize() for use in node.output().uses() if use.user.kind() == "prim::ListUnpack"]
    if not sizes:
        raise UnsupportedError(f"{node.kind()}, which gives a list")
    return int(sizes[0])


def leaves(value: Any) -> list[Any]:
    """The tensors that tuples and lists of a graph hold."""
    node = value.node()
    if node.kind() in ("prim::TupleConstruct", "prim::ListConstruct"):
        return [leaf for part in node.inputs() for leaf in leaves(part)]
    return [value]
