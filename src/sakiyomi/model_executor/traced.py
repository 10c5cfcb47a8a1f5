"""Decoding passes traced once and replayed: no Python between a pass's operators.

A trace takes a fraction of a second, needs no compiler, and serves every batch, length, tree and row count, since plan
and cache lie outside of it and sizes are read from its inputs. It runs the very operators of the eager pass, so that
its logits are equal to the last bit: as a program of the kernels (``program.py``), where they have all of its
operators, else in TorchScript's interpreter. What Python decides from a tensor's values would be baked in: tracing such
a model is refused, for torch warns of it. What follows from sizes, settings and weights may be baked in: of every row
count the first pass is compared with an eager one, and a row count that differs gets a trace of its own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.attention.registry import BeginPass, PassForward, PassResult
from sakiyomi.model_executor.program import Program, program_of
from sakiyomi.model_executor.program_steps import leaves

__all__ = ["TracedPasses", "interpreted", "no_gradients", "trace"]

logger = logging.getLogger("sakiyomi")
_TORCH = str(Path(torch.__file__).parent)
"""Code that decides by sizes, which a comparison finds out."""
_SIZED_BY_VALUES = {"aten::nonzero", "aten::nonzero_numpy", "aten::masked_select", "aten::repeat_interleave"} | {
    "aten::bincount", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
}  # fmt: skip
"""Operators whose results have a size that follows from values; so has a tensor that is indexed by truth values."""
WORTH_IT = 4  # eager passes after which one is traced


class TracedPasses:
    """Traces of one session's passes: see ``PassRecorder``.

    Args:
        forward: the eager pass.
        module: what it runs.
        sizes: row counts that come again, ascending, as do multiples of the last one.

    Attributes:
        failed: the model cannot be traced; its passes run eagerly.
        ready: the trace that serves a row count, once its logits were compared with those of an eager pass.
    """

    mode: ClassVar[str] = "traced"

    def __init__(self, forward: PassForward, module: nn.Module, sizes: Sequence[int]) -> None:
        self._forward, self._module, self._sizes = forward, module, tuple(sizes)
        # By the rows that they were made of; the first one serves all others. Before each its program, if it has one.
        self._traces: dict[int, list[PassForward]] = {}
        self.ready: dict[int, PassForward] = {}
        self._passes = 0
        self.fresh = self.failed = False

    def has(self, rows: int) -> bool:
        """Whether a pass of so many rows is replayed."""
        return self._serves(rows) and bool(self._traces)

    def _serves(self, rows: int) -> bool:
        return not self.failed and (rows in self._sizes or not rows % self._sizes[-1])

    def clear(self) -> None:
        """Nothing: no trace knows where the cache lies."""

    def record(self, begin: BeginPass, rows: int) -> None:
        """Trace a pass of so many rows now, if none is there."""
        if self._serves(rows) and not self._traces:
            self._trace(begin, rows)

    def run(self, begin: BeginPass, plan: BatchPlan, ids: Tensor, positions: Tensor) -> PassResult | None:
        """The pass that `begin` described; None: it is not traced (yet)."""
        size = ids.shape[1]
        self.fresh = False
        if not self._serves(size):
            return None
        if size in self.ready:
            with interpreted():
                return self.ready[size](ids, positions)
        if not self._traces:
            self._passes += bool(plan.rows)
            if self._passes <= WORTH_IT:
                return None
            self._trace(begin, size)
            begin(plan, size)
            self.fresh = True
        return self._prove(begin, plan, size, ids, positions) if plan.rows else None

    def _trace(self, begin: BeginPass, rows: int) -> None:
        ids = torch.zeros(1, rows, dtype=torch.int64)
        begin(BatchPlan([]), rows)
        try:
            made = trace(self._forward, self._module, ids, ids.clone())
            self._traces[rows] = [*filter(None, (_program(made),)), made]
        except Exception as error:  # whatever it is, the eager path is there
            self._fail(str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}")

    def _prove(self, begin: BeginPass, plan: BatchPlan, size: int, ids: Tensor, positions: Tensor) -> PassResult:
        """Run a pass both ways; its rows are written twice, with the same numbers."""
        expected = self._forward(ids, positions)
        self.fresh = True
        while not self.failed:
            for way in self._traces.get(size) or next(iter(self._traces.values())):
                begin(plan, size)
                if self._agrees(way, expected, plan.rows, ids, positions):
                    self.ready[size] = way
                    return expected
            if size in self._traces:
                self._fail("its logits differ from those of the eager pass")
            else:
                self._trace(begin, size)
        begin(plan, size)
        return self._forward(ids, positions)  # once more: the cache holds what the trace has written

    @staticmethod
    def _agrees(way: PassForward, expected: PassResult, rows: int, ids: Tensor, positions: Tensor) -> bool:
        try:
            with interpreted():
                found = way(ids, positions)
        except RuntimeError:  # a size in it is not that of these rows
            return False
        pairs = zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True)
        return all(a.shape == b.shape and torch.equal(a[:, :rows], b[:, :rows]) for a, b in pairs)

    def _fail(self, why: str) -> None:
        self.failed = True
        self._traces.clear()
        self.ready.clear()
        logger.info("passes cannot be traced and run eagerly: %s", " ".join(why.split())[:300])


def _program(made: Any) -> Program | None:
    """The program of a trace; None: it has none."""
    outputs = [leaf.type() for value in made.graph.outputs() for leaf in leaves(value)]
    if not all(found.sizes() for found in outputs):
        return None
    return program_of(made.graph, [], [(found.sizes()[-1], found.dtype()) for found in outputs])


def trace(forward: Callable[..., Any], module: nn.Module, *inputs: Tensor) -> Any:
    """A function that runs `module`, as TorchScript.

    Raises:
        UnsupportedError: Python decides something from a tensor's values, which is right for these inputs alone.
    """
    with warnings.catch_warnings(record=True) as told, _detached(module):
        warnings.simplefilter("always")
        with _Origins(told) as origins:
            made = torch.jit.trace(forward, inputs, check_trace=False)
    for place, warning in enumerate(told):
        doubted = issubclass(warning.category, TracerWarning) and place not in origins.harmless
        if doubted and not warning.filename.startswith(_TORCH):
            raise UnsupportedError(f"{warning.filename}:{warning.lineno}: {warning.message}")
    return made


class _Origins(TorchFunctionMode):
    """Tells, while a model is traced, what the values are made of that the trace makes constants of.

    Those that are made of settings, weights and sizes alone may be constants: whether another row count makes something
    else of them, a comparison with an eager pass finds out.

    Args:
        told: the trace's warnings, as they come.

    Attributes:
        harmless: which of them are about such values, by their places.
    """

    def __init__(self, told: Sequence[warnings.WarningMessage]) -> None:
        super().__init__()
        self.harmless: set[int] = set()
        self._told = told
        self._known: set[tuple[int, bool]] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call it; warnings that come of it are about its arguments."""
        before = len(self._told)
        result = func(*args, **(kwargs or {}))
        if len(self._told) > before:
            traced: Any = torch._C
            given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            if all(self._fixed(traced._get_value_trace(value)) for value in given):
                self.harmless.update(range(before, len(self._told)))
        return result

    def _fixed(self, value: Any) -> bool:
        """Whether a traced value is made of constants and sizes alone, and these sizes of no values."""
        waiting = [(value, False)]
        while waiting:
            value, size_of = waiting.pop()
            if (value.unique(), size_of) in self._known:  # after the first one that is not the trace is refused
                continue
            self._known.add((value.unique(), size_of))
            node = value.node()
            kind, sources = node.kind(), list(node.inputs())
            if kind == "prim::Param" and not size_of:
                return False
            if size_of and (kind in _SIZED_BY_VALUES or (kind == "aten::index" and _has_mask(sources[1]))):
                return False
            waiting += [(source, size_of or kind == "aten::size") for source in sources]
        return True


def _has_mask(indices: Any) -> bool:
    """Whether a list of indices has one of truth values among them."""
    types = [index.type() for index in indices.node().inputs()]
    return any(isinstance(found, torch._C.TensorType) and found.scalarType() == "Bool" for found in types)


@contextmanager
def _detached(module: nn.Module) -> Iterator[None]:
    """Parameters that require no gradients, as a trace holds them; their tensors are the model's own."""
    swapped = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.requires_grad:
                swapped.append((part, name, parameter))
                part._parameters[name] = parameter.detach()  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, name, parameter in swapped:
            part._parameters[name] = parameter


class no_gradients:
    """As ``torch.no_grad``, in a fifth of its time: it is entered in every round."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        torch._C._set_grad_enabled(self._before)


class interpreted:
    """Run traces as they are: profiling and fusing them takes seconds, and gains nothing between our operators."""

    def __enter__(self) -> None:
        self._before = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)

    def __exit__(self, *raised: object) -> None:
        torch._C._set_graph_executor_optimize(self._before)
