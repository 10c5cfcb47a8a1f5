"""Decoding passes traced once and replayed by TorchScript's interpreter: no Python between a pass's operators.

A trace takes a fraction of a second, needs no compiler, and serves every batch, length, tree and row count, since plan
and cache lie outside of it and sizes are read from its inputs. It runs the very operators of the eager pass, so that
its logits are equal to the last bit. What Python decides from a tensor's values would be baked in: tracing such a model
is refused by torch's own warning. What torch itself decides by sizes may be baked in, too: of every row count the first
pass is compared with an eager one, and a row count that differs gets a trace of its own.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.attention.registry import BeginPass, PassForward, PassResult

__all__ = ["TracedPasses", "interpreted", "no_gradients", "trace"]

logger = logging.getLogger("sakiyomi")
_TRANSFORMERS = importlib.util.find_spec("transformers")
assert _TRANSFORMERS is not None and _TRANSFORMERS.origin is not None
_BY_SIZE = (str(Path(torch.__file__).parent), str(Path(_TRANSFORMERS.origin).with_name("masking_utils.py")))
"""Code that decides by sizes, which a comparison finds out; masks are ours."""
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
        self._traces: dict[int, Any] = {}  # by the row count that they were made of; the first one serves all others
        self.ready: dict[int, Any] = {}
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
            return self._replay(ids, positions)
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
            self._traces[rows] = trace(self._forward, self._module, ids, ids.clone())
        except Exception as error:  # whatever it is, the eager path is there
            self._fail(str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}")

    def _prove(self, begin: BeginPass, plan: BatchPlan, size: int, ids: Tensor, positions: Tensor) -> PassResult:
        """Run a pass both ways; its rows are written twice, with the same numbers."""
        expected = self._forward(ids, positions)
        self.fresh = True
        while not self.failed:
            begin(plan, size)
            if self._agrees(expected, plan.rows, size, ids, positions):
                self.ready[size] = self._serving(size)
                return expected
            if size in self._traces:
                self._fail("its logits differ from those of the eager pass")
            else:
                self._trace(begin, size)
        begin(plan, size)
        return self._forward(ids, positions)  # once more: the cache holds what the trace has written

    def _agrees(self, expected: PassResult, rows: int, size: int, ids: Tensor, positions: Tensor) -> bool:
        try:
            found = self._replay(ids, positions)
        except RuntimeError:  # a size in it is not that of these rows
            return False
        pairs = zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True)
        return all(a.shape == b.shape and torch.equal(a[:, :rows], b[:, :rows]) for a, b in pairs)

    def _replay(self, ids: Tensor, positions: Tensor) -> PassResult:
        with interpreted():
            logits, states = self._serving(ids.shape[1])(ids, positions)
        return logits, states

    def _serving(self, rows: int) -> Any:
        return self._traces.get(rows) or next(iter(self._traces.values()))

    def _fail(self, why: str) -> None:
        self.failed = True
        self._traces.clear()
        self.ready.clear()
        logger.info("passes cannot be traced and run eagerly: %s", " ".join(why.split())[:300])


def trace(forward: Callable[..., Any], module: nn.Module, *inputs: Tensor) -> Any:
    """A function that runs `module`, as TorchScript.

    Raises:
        UnsupportedError: Python decides something from a tensor's values, which is right for these inputs alone.
    """
    with warnings.catch_warnings(record=True) as told, _detached(module):
        warnings.simplefilter("always")
        made = torch.jit.trace(forward, inputs, check_trace=False)
    doubts = [w for w in told if issubclass(w.category, TracerWarning) and not _harmless(w)]
    if doubts:
        raise UnsupportedError(f"{doubts[0].filename}:{doubts[0].lineno}: {doubts[0].message}")
    return made


def _harmless(told: warnings.WarningMessage) -> bool:
    """Whether what stands there makes a constant of settings, or decides by sizes alone, which a comparison with an
    eager pass finds out.
    """
    if told.filename.startswith(_BY_SIZE):
        return True
    line = linecache.getline(told.filename, told.lineno).strip()
    try:
        statement = ast.parse(f"{line} pass" if line.startswith("if ") else line).body[0]
    except SyntaxError:
        return False
    if str(told.message).startswith("torch.tensor results are registered as constants"):
        made = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and _of_torch(node.func)]
        return bool(made) and all(call.args and _is_setting(call.args[0]) for call in made)
    return isinstance(statement, ast.If) and _by_size(statement)


def _of_torch(function: ast.expr) -> bool:
    """Whether this is ``torch.tensor``."""
    return ast.unparse(function) == "torch.tensor"


def _is_setting(value: ast.expr) -> bool:
    """Whether this is ``self.name``, which a module was made with."""
    return isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self"


def _by_size(statement: ast.If) -> bool:
    sizes = {id(node.value) for node in ast.walk(statement.test) if _is_size(node)}
    plain = (ast.BoolOp, ast.Compare, ast.Constant, ast.Subscript, ast.boolop, ast.cmpop, ast.expr_context)
    return all(id(node) in sizes or _is_size(node) or isinstance(node, plain) for node in ast.walk(statement.test))


def _is_size(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Whether this is ``name.shape`` or ``name.ndim``."""
    return isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim") and isinstance(node.value, ast.Name)


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
