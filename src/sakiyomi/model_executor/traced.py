"""Decoding passes traced once and replayed by TorchScript's interpreter: no Python between a pass's operators.

A trace takes a fraction of a second, needs no compiler, and serves every batch, length and tree of its row count, since
plan and cache lie outside of it. It runs the very operators of the eager pass, so that its logits are equal to the last
bit. What Python decides from a tensor's values would be baked in: tracing such a model is refused by torch's own
warning, and each trace is compared with an eager pass over other rows before it is used.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers.masking_utils
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.attention.registry import BeginPass, PassForward, PassResult

__all__ = ["TracedPasses"]

logger = logging.getLogger("sakiyomi")
_BY_SIZE = (str(Path(torch.__file__).parent), str(Path(transformers.masking_utils.__file__)))
"""Code that decides by sizes, which are those of every pass of the trace; masks are ours."""
WORTH_IT = 4  # eager passes of a row count, after which it is traced


class TracedPasses:
    """Traces of one session's passes, by row count: see ``PassRecorder``.

    Args:
        forward: the eager pass.
        module: what it runs.
        sizes: row counts that come again.

    Attributes:
        failed: the model cannot be traced; its passes run eagerly.
    """

    mode: ClassVar[str] = "traced"

    def __init__(self, forward: PassForward, module: nn.Module, sizes: Sequence[int]) -> None:
        self._forward, self._module, self._sizes = forward, module, frozenset(sizes)
        self._traces: dict[int, Any] = {}
        self._proven: set[int] = set()
        self._passes: Counter[int] = Counter()
        self.fresh = self.failed = False

    def has(self, rows: int) -> bool:
        """Whether a pass of so many rows is replayed."""
        return rows in self._traces and not self.failed

    def clear(self) -> None:
        """Nothing: no trace knows where the cache lies."""

    def record(self, begin: BeginPass, rows: int) -> None:
        """Trace a pass of so many rows now."""
        if self.failed or rows in self._traces or rows not in self._sizes:
            return
        ids = torch.zeros(1, rows, dtype=torch.int64)
        begin(BatchPlan([]), rows)
        try:
            with warnings.catch_warnings(record=True) as told, _detached(self._module):
                warnings.simplefilter("always")
                trace = torch.jit.trace(self._forward, (ids, ids.clone()), check_trace=False)
            # What Python has decided from a tensor's values is right for these rows alone.
            doubts = [w for w in told if issubclass(w.category, TracerWarning) and not w.filename.startswith(_BY_SIZE)]
            if doubts:
                self._fail(f"{doubts[0].filename}:{doubts[0].lineno}: {doubts[0].message}")
            else:
                self._traces[rows] = trace
        except Exception as error:  # whatever it is, the eager path is there
            self._fail(f"{type(error).__name__}: {error}")

    def run(self, begin: BeginPass, plan: BatchPlan, ids: Tensor, positions: Tensor) -> PassResult | None:
        """The pass that `begin` described; None: it is not traced (yet)."""
        size = ids.shape[1]
        self.fresh = False
        if self.failed or size not in self._sizes:
            return None
        if size in self._proven:
            return self._replay(size, ids, positions)
        if size in self._traces and plan.rows:
            return self._prove(begin, plan, size, ids, positions)
        self._passes[size] += bool(plan.rows)
        if self._passes[size] > WORTH_IT and size not in self._traces:
            self.record(begin, size)
            begin(plan, size)
            self.fresh = True
        return None

    def _prove(self, begin: BeginPass, plan: BatchPlan, size: int, ids: Tensor, positions: Tensor) -> PassResult:
        """Run a pass both ways; its rows are written twice, with the same numbers."""
        expected = self._forward(ids, positions)
        begin(plan, size)
        self.fresh = True
        found = self._replay(size, ids, positions)
        pairs = zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True)
        if all(torch.equal(a[:, : plan.rows], b[:, : plan.rows]) for a, b in pairs):
            self._proven.add(size)
        else:
            begin(plan, size)
            expected = self._forward(ids, positions)  # once more: the cache holds what the trace has written
            self._fail("its logits differ from those of the eager pass")
        return expected

    def _replay(self, size: int, ids: Tensor, positions: Tensor) -> PassResult:
        with _interpreted():
            logits, states = self._traces[size](ids, positions)
        return logits, states

    def _fail(self, why: str) -> None:
        self.failed = True
        self._traces.clear()
        logger.info("passes cannot be traced and run eagerly: %s", " ".join(why.split())[:300])


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


@contextmanager
def _interpreted() -> Iterator[None]:
    """Run traces as they are: profiling and fusing them takes seconds, and gains nothing between our operators."""
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)
