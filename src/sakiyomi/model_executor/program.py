"""A traced pass as a list of steps that the compiled kernels run by themselves: neither Python nor torch is called.

`kernels/program.h` runs it, with the operators that torch would call, so that its logits are equal to the last bit.
What follows from positions alone, as the angles of rotary embeddings, is computed once by torch for all of them, and
looked up. A pass with any other operator has no program, and stays torch's.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.build import loaded
from sakiyomi.kernels.native import numbers
from sakiyomi.model_executor.attention.registry import PassResult

__all__ = ["Program", "leaves", "program_of"]

logger = logging.getLogger("sakiyomi")
OPERATORS = (
    "linear", "experts", "attend", "cross", "recur", "norm", "gated", "rotate", "rows", "size", "view", "transpose",
    "unsqueeze", "slice", "part", "contiguous", "add", "mul", "div",
)  # fmt: skip
"""In the order of Op in program.h."""
_TENSOR, _NUMBER, _WHOLE, _REAL = range(4)  # kinds of Operand there
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2}
IDS, POSITIONS = range(2)  # the first values
REACH = 2048  # positions that are computed at first
_ALIKE = {"prim::NumToTensor", "aten::Int", "aten::dropout", "aten::detach"}
"""Operators that give what they are given."""


class Program:
    """Runs passes of a model: see ``PassForward``.

    Args:
        builder: of its steps.
        outputs: the values that a pass gives, logits first.
        widths: numbers in a row of each.
        dtype: of all.

    Attributes:
        number: of the program in the kernels.
    """

    def __init__(self, builder: _Builder, outputs: Sequence[int], widths: Sequence[int], dtype: torch.dtype) -> None:
        self.number = 0
        self._kernels = cast(Any, loaded())
        self._held = builder.constants
        self._tables, self._reach = builder.tables, 0
        self._widths, self._dtype = tuple(widths), dtype
        code = numbers(builder.code)
        tables = numbers([number for number, _ in self._tables])
        sizes = builder.count, len(code), code, len(outputs), numbers(outputs), len(tables), tables
        self.number = int(self._kernels.sk_program(*sizes))
        for number, tensor in self._held.items():
            self._set(number, tensor)
        self._extend(REACH)

    def __del__(self) -> None:
        if self.number:
            self._kernels.sk_free_program(self.number)

    def gives(self, vocab: int, dtype: torch.dtype) -> bool:
        """Whether logits are of this width and type."""
        return (self._widths[0], self._dtype) == (vocab, dtype)

    def __call__(self, ids: Tensor, positions: Tensor) -> PassResult:
        """The pass that was begun, with all of its rows.

        Raises:
            RuntimeError: it cannot be run.
        """
        made = [torch.empty(1, ids.shape[1], width, dtype=self._dtype) for width in self._widths]
        places = (ctypes.c_void_p * len(made))(*[tensor.data_ptr() for tensor in made])
        why = ctypes.c_char_p()
        given = ids.shape[1], ids.data_ptr(), positions.data_ptr(), places, ctypes.byref(why)
        code = self._kernels.sk_run(self.number, *given)
        if code == 1:
            self._extend(int(positions.max()) + 1)
            code = self._kernels.sk_run(self.number, *given)
        if code:
            raise RuntimeError(f"a program does not run: {(why.value or b'a position below 0').decode()}")
        return made[0], tuple(made[1:])

    def _set(self, number: int, tensor: Tensor) -> None:
        tensor = self._held[number] = tensor.contiguous()
        about = _DTYPES[tensor.dtype], tensor.dim(), numbers(tensor.shape)
        self._kernels.sk_constant(self.number, number, tensor.data_ptr(), *about)

    def _extend(self, positions: int) -> None:
        """Have tables reach so far, and some more."""
        if positions > self._reach:
            self._reach = max(positions, 2 * self._reach)
            for number, table in self._tables:
                self._set(number, table(self._reach))


def program_of(
    graph: Any, given: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype, head: Any = None
) -> Program | None:
    """A traced pass as a program; None: there are no kernels, or one of its operators is not among theirs.

    Args:
        graph: TorchScript, from ids, positions, perhaps the rows to keep, and what is given, to what a pass gives.
        given: tensors that are the same in all passes.
        widths: see ``Program``.
        dtype: see ``Program``.
        head: a packed layer that makes logits, which become the first output, of the graph's only one.
    """
    if loaded() is None:
        return None
    try:
        graph = graph.copy()
        torch._C._jit_pass_inline(graph)
        torch._C._jit_pass_dce(graph)
        builder = _Builder(graph, given)
        outputs = [builder.tensor(value) for value in builder.outputs]
        if head is not None:
            given_head = (_TENSOR, outputs[0]), (_WHOLE, head.index), (_WHOLE, head.out_features)
            outputs.insert(0, builder.emit("linear", *given_head))
        return Program(builder, outputs, widths, dtype) if len(outputs) == len(widths) else None
    except Exception as error:  # whatever it is, the trace is there
        logger.debug("a pass has no program: %r", error)
        return None


class _Operand(NamedTuple):
    """What a step reads: the number of a value, or a constant."""

    kind: int
    value: int


class _OfPositions:
    """What follows from positions alone, which torch computes."""


class _AllRows:
    """The rows that are kept, which are all."""


class _Builder:
    """The steps of a graph.

    Args:
        graph: as of ``program_of``.
        given: as there.

    Attributes:
        code: of the steps, as `sk_program` takes them.
        count: of values.
        constants: tensors that are the same in all passes, by their values.
        tables: what makes those of so many positions, with their values.
        outputs: of the graph.

    Raises:
        UnsupportedError: an operator is not among the kernels'.
    """

    def __init__(self, graph: Any, given: Sequence[Tensor]) -> None:
        self.code: list[int] = []
        self.count = 2
        self.constants: dict[int, Tensor] = {}
        self.tables: list[tuple[int, Callable[[int], Tensor]]] = []
        self._known: dict[int, Any] = {}
        self._looked_up: dict[int, int] = {}
        inputs = [value for value in graph.inputs() if isinstance(value.type(), torch._C.TensorType)]
        keeping = [_AllRows()] * (len(inputs) - len(given) - 2)
        known = [_Operand(_TENSOR, IDS), _OfPositions(), *keeping, *given]
        self._known |= {value.unique(): each for value, each in zip(inputs, known, strict=True)}
        self._positions = inputs[POSITIONS]
        self._looked_up[self._positions.unique()] = POSITIONS
        for value in graph.inputs():
            self._known.setdefault(value.unique(), None)  # the script itself
        with torch.no_grad():
            for node in graph.nodes():
                self._take(node)
        self.outputs = [value for output in graph.outputs() for value in leaves(output)]

    # ------------------------------------------------------------ values

    def tensor(self, value: Any) -> int:
        """The number of a tensor that a step may read."""
        return self._operand(value, self._known[value.unique()])[1]

    def _fixed(self, tensor: Tensor) -> int:
        """The number of a tensor that is the same in all passes."""
        self.count += 1
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(f"a tensor of {tensor.dtype}")
        self.constants[self.count - 1] = tensor.detach()
        return self.count - 1

    def _operand(self, value: Any, known: Any) -> _Operand:
        if isinstance(known, _Operand):
            return known
        if isinstance(known, _OfPositions):
            return _Operand(_TENSOR, self._look_up(value))
        if isinstance(known, Tensor):
            if known.dim():
                return _Operand(_TENSOR, self._fixed(known))
            known = known.item()
        if isinstance(known, bool | int):
            return _Operand(_WHOLE, int(known))
        if isinstance(known, float):
            return _Operand(_REAL, _bits(known))
        raise UnsupportedError(f"a step that reads {type(known).__name__}")

    def emit(self, name: str, *given: tuple[int, int]) -> int:
        """A step; the number of the value that it makes."""
        self.count += 1
        self.code += [OPERATORS.index(name), self.count - 1, len(given), *(x for operand in given for x in operand)]
        return self.count - 1

    # ------------------------------------------------------------ what follows from positions alone

    def _look_up(self, value: Any) -> int:
        """Rows of a table, of the pass's positions."""
        if value.unique() not in self._looked_up:
            few, more = self._computed(value, torch.arange(5)), self._computed(value, torch.arange(7))
            places = [d for d, (a, b) in enumerate(zip(few.shape, more.shape, strict=True)) if a != b]
            if len(places) != 1 or more.shape[places[0]] != 7 or more.shape[: places[0]].numel() != 1:
                raise UnsupportedError("what follows from positions has no row for each")
            at = places[0]

            def table(count: int) -> Tensor:
                return self._computed(value, torch.arange(count)).flatten(0, at)

            whole, turned = table(64), self._computed(value, torch.arange(64).flip(0)).flatten(0, at)
            alone = self._computed(value, torch.tensor([3])).flatten(0, at)
            if not torch.equal(whole.flip(0), turned) or not torch.equal(whole[3:4], alone):
                raise UnsupportedError("what follows from a position depends on the others")
            self.count += 1
            self.tables.append((self.count - 1, table))
            found = self.emit("rows", (_TENSOR, self.count - 1), (_TENSOR, POSITIONS))  # (1, N, ...)
            if at != 1:
                sizes = [(_WHOLE, size) for size in (*(1,) * at, -1, *more.shape[at + 1 :])]
                found = self.emit("view", (_TENSOR, found), *sizes)
            self._looked_up[value.unique()] = found
        return self._looked_up[value.unique()]

    def _computed(self, value: Any, positions: Tensor) -> Tensor:
        """A value that follows from positions (N) alone."""
        known: dict[int, Any] = {self._positions.unique(): positions[None]}

        def find(each: Any) -> Any:
            held = self._known[each.unique()]
            if not isinstance(held, _OfPositions):
                return [find(part) for part in each.node().inputs()] if isinstance(held, list) else held
            if each.unique() not in known:
                known[each.unique()] = _call(each.node(), [find(part) for part in each.node().inputs()])
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
            raise UnsupportedError(kind)

    def _made(self, node: Any, kind: str, inputs: list[Any], known: list[Any]) -> Any:
        if kind == "prim::Constant":
            return node.output().toIValue()
        moving = [each for each in _flat(known) if isinstance(each, _Operand | _OfPositions | _AllRows)]
        if kind in ("prim::ListConstruct", "prim::TupleConstruct"):
            return known
        if not moving:
            return _call(node, known)
        if kind in _ALIKE and isinstance(known[0], _Operand) and (kind != "aten::dropout" or not known[2]):
            return known[0]
        if kind == "aten::size" and len(known) == 2:
            operands = [self._operand(value, each) for value, each in zip(inputs, known, strict=True)]
            return _Operand(_NUMBER, self.emit("size", *operands))
        if all(isinstance(each, _OfPositions) for each in moving):
            return _OfPositions()
        if (
            kind == "aten::index"
            and isinstance(known[0], _Operand)
            and all(each is None or isinstance(each, _AllRows) for each in known[1])
        ):
            return known[0]
        if kind in ("aten::chunk", "aten::split_with_sizes"):
            return self._parts(kind, self._operand(inputs[0], known[0]), *known[1:])
        if kind not in _STEPS:
            raise UnsupportedError(kind)
        name, order = _STEPS[kind]
        operands = [self._operand(value, each) for value, each in order(inputs, known)]
        return _Operand(_TENSOR, self.emit(name, *operands))

    def _parts(self, kind: str, whole: _Operand, sizes: Any, dimension: Any) -> list[_Operand]:
        """A tensor cut along a dimension: into so many equal parts, or into those of these sizes."""
        if not isinstance(dimension, int) or not all(isinstance(size, int) for size in _flat(sizes)):
            raise UnsupportedError("parts whose sizes are computed")
        along = (_WHOLE, dimension)
        if kind == "aten::chunk":
            cuts = [("part", whole, along, (_WHOLE, sizes), (_WHOLE, i)) for i in range(sizes)]
        else:
            ends = list(accumulate(sizes, initial=0))
            cuts = [("slice", whole, along, (_WHOLE, a), (_WHOLE, b)) for a, b in pairwise(ends)]
        return [_Operand(_TENSOR, self.emit(name, *given)) for name, *given in cuts]


# ---------------------------------------------------------------- which step an operator becomes, and what that reads

Pair = tuple[Any, Any]  # a value of the graph, and what is known of it
Order = Callable[[list[Any], list[Any]], Iterable[Pair]]


def _each(value: Any, known: Any) -> Iterable[Pair]:
    """A value, or those of a list."""
    if not isinstance(known, list):
        return [(value, known)]
    parts = list(value.node().inputs())
    return zip(parts if len(parts) == len(known) else [value] * len(known), known, strict=True)


def _all(inputs: list[Any], known: list[Any]) -> Iterable[Pair]:
    for value, each in zip(inputs, known, strict=True):
        yield from _each(value, each)


def _norm(inputs: list[Any], known: list[Any]) -> Iterable[Pair]:
    if not isinstance(known[1], Tensor):
        raise UnsupportedError("a norm by a weight that is computed")
    return [(inputs[1], known[1].float()), *zip(inputs[2:], known[2:], strict=True), *_each(inputs[0], known[0])]


def _recur(inputs: list[Any], known: list[Any]) -> Iterable[Pair]:
    rows, fixed = list(_each(inputs[0], known[0])), known[1]
    if not all(isinstance(tensor, Tensor) for tensor in fixed):
        raise UnsupportedError("a recurrence by weights that are computed")
    return [(inputs[2], known[2]), (None, len(rows)), *rows, *((None, tensor.float()) for tensor in fixed)]


def _embedding(inputs: list[Any], known: list[Any]) -> Iterable[Pair]:
    return zip(inputs[:2], known[:2], strict=True)


def _first(count: int, *wanted: Any) -> Order:
    """The first inputs; those behind them have to be these."""

    def order(inputs: list[Any], known: list[Any]) -> Iterable[Pair]:
        if tuple(known[count:]) != wanted:
            raise UnsupportedError(f"an operator with {known[count:]}")
        return _all(inputs[:count], known[:count])

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
    "aten::add": ("add", _first(2, 1)),
    "aten::mul": ("mul", _first(2)),
    "aten::div": ("div", _first(2)),
}


def leaves(value: Any) -> list[Any]:
    """The tensors that tuples and lists of a graph hold."""
    node = value.node()
    if node.kind() in ("prim::TupleConstruct", "prim::ListConstruct"):
        return [leaf for part in node.inputs() for leaf in leaves(part)]
    return [value]


def _flat(known: Any) -> Iterable[Any]:
    if isinstance(known, list):
        for each in known:
            yield from _flat(each)
    else:
        yield known


def _bits(number: float) -> int:
    return int(struct.unpack("=q", struct.pack("=d", number))[0])


def _call(node: Any, given: list[Any]) -> Any:
    """What an operator gives."""
    kind = node.kind()
    if kind == "prim::NumToTensor":
        return torch.tensor(given[0])
    if kind == "aten::Int":
        return int(given[0])
    space, _, name = kind.partition("::")
    if space != "aten":
        raise UnsupportedError(kind)
    schema = torch._C.parse_schema(node.schema())
    operator = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
    pairs = list(zip(schema.arguments, given, strict=True))
    by_name = {argument.name: value for argument, value in pairs if argument.kwarg_only}
    return operator(*[value for argument, value in pairs if not argument.kwarg_only], **by_name)
