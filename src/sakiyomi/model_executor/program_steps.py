"""Translates the operators of a traced pass into the steps of a program.

Operators that the kernels have are theirs (``kernel_steps.py``); all others are torch's, called by name
(``torch_steps.py``), where needed under another one (``number_steps.py``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.kernel_steps import KERNEL_STEPS, Pair
from sakiyomi.model_executor.number_steps import without_number
from sakiyomi.model_executor.step_list import ARITHMETIC, IDS, POSITIONS, StepList
from sakiyomi.model_executor.torch_steps import (
    NUMBER,
    TENSOR,
    WHOLE,
    Operand,
    PythonFunction,
    call_operands,
    each_of,
    node_function,
)

_ALIKE = (
    "prim::NumToTensor", "aten::Int", "aten::IntImplicit", "aten::ScalarImplicit", "aten::dropout", "aten::detach",
)  # fmt: skip
"""Operators that return their argument."""


class _OfPositions:
    """A value that depends on positions alone, computed by torch."""


class _KeptRows:
    """The numbers of the rows whose results are wanted."""


class Builder:
    """The steps of a graph.

    Args:
        graph, given: see ``Program``.

    Attributes:
        steps: of the graph.
        tables: number of the value, and function from a number of positions to the table.
        functions: Python functions that steps call.
        outputs: outputs of the graph, as operands.

    Raises:
        UnsupportedError: an operator can be called neither by the kernels nor by Python.
    """

    def __init__(self, graph: Any, given: Sequence[Tensor]) -> None:
        self.steps = StepList()
        self.tables: list[tuple[int, Callable[[int], Tensor]]] = []
        self.functions: list[PythonFunction] = []
        self._graph = graph  # its nodes are read later, too
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

    def _operand(self, value: Any, known: Any) -> Operand:
        return self._at_positions(value) if isinstance(known, _OfPositions) else self.steps.operand(known)

    # ------------------------------------------------------------ values that depend on positions alone

    def _at_positions(self, value: Any) -> Operand:
        """Looked up in a table, or computed in each pass if there is no row for each position."""
        if isinstance(made := self._known[value.unique()], Operand):
            return made
        try:
            return Operand(TENSOR, self._look_up(value))
        except UnsupportedError:
            node = value.node()
            inputs = list(node.inputs())
            found = self._called(node, inputs, [self._known[each.unique()] for each in inputs])
            self._known |= {each.unique(): made for each, made in zip(node.outputs(), found, strict=True)}
            return self._operand(value, self._known[value.unique()])

    def _look_up(self, value: Any) -> int:
        """The rows of a table for the positions of the pass."""
        if value.unique() not in self._looked_up:
            compute = functools.partial(self._computed, self._known, value)
            few, more = compute(torch.arange(5)), compute(torch.arange(7))
            places = [d for d, (a, b) in enumerate(zip(few.shape, more.shape, strict=True)) if a != b]
            if len(places) != 1 or more.shape[places[0]] != 7 or more.shape[: places[0]].numel() != 1:
                raise UnsupportedError("a value of positions without a row for each")
            at = places[0]

            def table(count: int) -> Tensor:
                return compute(torch.arange(count)).flatten(0, at)

            whole, turned = table(64), compute(torch.arange(64).flip(0)).flatten(0, at)
            alone = compute(torch.tensor([3])).flatten(0, at)
            if not torch.equal(whole.flip(0), turned) or not torch.equal(whole[3:4], alone):
                raise UnsupportedError("a value of a position that depends on the others")
            whole_table = self.steps.value()
            self.tables.append((whole_table, table))
            found = self.steps.emit("rows", (TENSOR, whole_table), (TENSOR, POSITIONS))  # (1, N, ...)
            if at != 1:
                sizes = [(WHOLE, size) for size in (*(1,) * at, -1, *more.shape[at + 1 :])]
                found = self.steps.emit("view", found, *sizes)
            self._looked_up[value.unique()] = found.value
        return self._looked_up[value.unique()]

    def _computed(self, values: Mapping[int, Any], value: Any, positions: Tensor) -> Tensor:
        """A value that depends on positions (N) alone."""
        known: dict[int, Any] = {self._positions.unique(): positions[None]}

        def find(each: Any) -> Any:
            held = values[each.unique()]
            if isinstance(held, Operand):
                raise UnsupportedError("a value that is computed in each pass")
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
            return self.steps.emit("size", *self._operands(zip(inputs, known, strict=True)))
        listed = isinstance(node.output().type(), torch._C.ListType)
        if not listed and all(isinstance(each, _OfPositions) for each in moving):
            return _OfPositions()
        if kind == "aten::index" and isinstance(known[0], Operand):
            kept = [d for d, each in enumerate(known[1]) if isinstance(each, _KeptRows)]
            if len(kept) == 1 and sum(each is None for each in known[1]) == len(known[1]) - 1:
                return self.steps.emit("kept", known[0], Operand(WHOLE, kept[0]))
        if kind in ("aten::chunk", "aten::split", "aten::split_with_sizes"):
            return self._parts(node, self._operand(inputs[0], known[0]), *known[1:])
        if kind in ARITHMETIC and all(map(_is_whole, known[:2])):
            return self.steps.counted(kind, *self._operands(zip(inputs[:2], known[:2], strict=True)))
        if kind == "aten::neg" and _is_whole(known[0]):
            return self.steps.counted("aten::sub", Operand(WHOLE, 0), self._operand(inputs[0], known[0]))
        if (found := self._step(kind, inputs, known)) is not None:
            return found
        made = self._called(node, inputs, known)
        return made if listed else made[0]

    def _operands(self, pairs: Iterable[Pair]) -> list[Operand]:
        return [self._operand(value, known) for value, known in pairs]

    def _step(self, kind: str, inputs: list[Any], known: list[Any]) -> Operand | None:
        """A step of the kernels; None: they have none for it."""
        if kind not in KERNEL_STEPS:
            return None
        name, order = KERNEL_STEPS[kind]
        pairs = order(inputs, known)
        if pairs is None:
            return None
        operands = self._operands(pairs)
        if kind.endswith("_") and (operands[0] != known[0] or operands[0].value in self.steps.shared):
            return None  # the step makes another tensor, and others read this one
        return self.steps.emit(name, *operands)

    def _called(self, node: Any, inputs: list[Any], known: list[Any]) -> list[Operand]:
        """The results of an operator of torch: called without its number, by name, or through Python."""
        aliases = _aliases(node)
        written = known[0] if aliases == "written" else None
        if aliases == "written" and (not isinstance(written, Operand) or written.value in self.steps.lasting):
            raise UnsupportedError(f"{node.kind()} of what other passes read")
        for way in (self._without_number, self._by_name):
            with suppress(UnsupportedError):
                found, given = way(node, inputs, known)
                break
        else:
            found, given = self._through_python(node, inputs, known)
        if isinstance(written, Operand):
            given = [written]
        if aliases:
            for operand, made in itertools.product(given, found):
                self.steps.share(operand.value, made.value)
        return found

    def _without_number(self, node: Any, inputs: list[Any], known: list[Any]) -> tuple[list[Operand], list[Operand]]:
        """The result of operators that replace one with a number, and its tensor arguments."""
        arguments = [self._argument(*pair) for pair in zip(inputs, known, strict=True)]
        made = without_number(self.steps, node, arguments)
        return [made], [each for each in _flat(arguments) if isinstance(each, Operand)]

    def _by_name(self, node: Any, inputs: list[Any], known: list[Any]) -> tuple[list[Operand], list[Operand]]:
        """The results of an operator that is called from C++, and its tensor arguments."""
        if node.kind().startswith("prim::"):
            raise UnsupportedError(node.kind())
        schema = torch._C.parse_schema(node.schema())
        operands = call_operands(schema, inputs, known, self._read)
        made = self.steps.call(node.kind(), schema.overload_name, len(schema.returns), operands)
        return made, [each for each in operands if each.kind == TENSOR]

    def _read(self, value: Any, known: Any) -> Operand:
        if isinstance(known, str):
            return self.steps.text(known)
        return self.steps.constant(known) if isinstance(known, Tensor) else self._operand(value, known)

    def _through_python(self, node: Any, inputs: list[Any], known: list[Any]) -> tuple[list[Operand], list[Operand]]:
        """The results of any other operator, and its tensor arguments."""
        arguments = [self._argument(*pair) for pair in zip(inputs, known, strict=True)]
        moving = [each for each in _flat(arguments) if isinstance(each, Operand)]
        compute = node_function(node)

        def run(*given: Any) -> Any:
            return compute(_filled(arguments, iter(given)))

        outputs = list(node.outputs())
        returns = _list_size(node) if isinstance(outputs[0].type(), torch._C.ListType) else len(outputs)
        if not all(isinstance(each.type(), torch._C.TensorType | torch._C.ListType) for each in outputs):
            raise UnsupportedError(f"{node.kind()}, which returns more than tensors")
        function = PythonFunction(run, moving, returns)
        self.functions.append(function)
        made = self.steps.call(function.name, "", returns, [Operand(WHOLE, function.number), *moving])
        return made, [each for each in moving if each.kind == TENSOR]

    def _argument(self, value: Any, known: Any) -> Any:
        """An argument in which operands replace all that differs from pass to pass."""
        if isinstance(known, list):
            return [self._argument(*pair) for pair in each_of(value, known)]
        if isinstance(known, _KeptRows):
            raise UnsupportedError("an operator on the numbers of wanted rows")
        return self._operand(value, known) if isinstance(known, Operand | _OfPositions) else known

    def _parts(self, node: Any, whole: Operand, sizes: Any, dimension: Any) -> list[Operand]:
        """A tensor cut along a dimension: into a number of equal parts, or into parts of these sizes."""
        kind, along = node.kind(), Operand(WHOLE, dimension)
        if kind == "aten::chunk":
            cuts = [("part", whole, along, Operand(WHOLE, sizes), Operand(WHOLE, i)) for i in range(sizes)]
        else:
            if isinstance(sizes, int):
                sizes = [sizes] * _list_size(node)
            ends = [Operand(WHOLE, 0)]
            for size in sizes:
                ends.append(self.steps.after(ends[-1], self.steps.operand(size)))
            cuts = [("slice", whole, along, *pair) for pair in itertools.pairwise(ends)]
        return [self.steps.emit(name, *given) for name, *given in cuts]


def _is_whole(known: Any) -> bool:
    """Whether it is a whole number, constant or computed by a pass."""
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
    """Arguments in which the given values replace the operands, in order."""
    return [
        _filled(each, given) if isinstance(each, list) else next(given) if isinstance(each, Operand) else each
        for each in arguments
    ]


def _aliases(node: Any) -> str:
    """Whether results may share the memory of an argument ("viewed"), or are written there ("written"); "": neither."""
    if node.kind().startswith("prim::"):
        return "viewed"
    schema = torch._C.parse_schema(node.schema())
    first = schema.arguments[0].alias_info if schema.arguments else None
    if first is not None and first.is_write:
        return "written"
    return "viewed" if any(made.alias_info is not None for made in schema.returns) else ""


def _list_size(node: Any) -> int:
    """The length of the list that an operator returns.

    Raises:
        UnsupportedError: it is not known.
    """
    sizes = [use.user.outputsSize() for use in node.output().uses() if use.user.kind() == "prim::ListUnpack"]
    if not sizes:
        raise UnsupportedError(f"{node.kind()}, which returns a list")
    return int(sizes[0])


def leaves(value: Any) -> list[Any]:
    """The tensors that tuples and lists of a graph hold."""
    node = value.node()
    if node.kind() in ("prim::TupleConstruct", "prim::ListConstruct"):
        return [leaf for part in node.inputs() for leaf in leaves(part)]
    return [value]
