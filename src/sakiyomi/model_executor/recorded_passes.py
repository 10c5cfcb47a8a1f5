"""Decoding passes recorded once and run without Python between their operators.

A recording is made from a trace (``trace.py``), which takes a fraction of a second and needs no compiler, or comes with
a model that was read from a file (``recorded_model.py``). The kernels run it as a program (``program.py``), by the very
operators of the eager pass. It serves every batch, length, tree and row count: it does not contain plan and cache, and
reads sizes from its inputs. A size may have become a constant in the trace. So the first pass of each row count is
compared with an eager one (bit-equal logits and hidden states), and a row count that differs gets its own recording.
Of a recording from a file only logits were compared, when it was written, at up to four row counts (``TRIED`` in
``loading/recorder.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.attention.registry import BeginPass, PassForward, PassResult
from sakiyomi.model_executor.program import Program
from sakiyomi.model_executor.program_steps import leaves
from sakiyomi.model_executor.recorded_model import RecordedModel
from sakiyomi.model_executor.trace import trace

logger = logging.getLogger("sakiyomi")
WORTH_IT = 4  # eager passes before one is recorded
ROWS = 8  # of the pass that is recorded first


class RecordedPasses:
    """Recorded passes of one session: see ``PassRecorder``.

    Args:
        forward: the eager pass.
        module: the model. One that was read from a file has its recording, which serves all sizes at once.
        sizes: row counts of decoding passes, ascending; multiples of the last one come too.

    Attributes:
        failed: the model cannot be recorded; its passes run eagerly.
        ready: by row count, the recording that serves it: one from a file, or one that equalled an eager pass there.
    """

    mode: ClassVar[str] = "recorded"

    def __init__(self, forward: PassForward, module: Any, sizes: Sequence[int]) -> None:
        self._forward, self._sizes = forward, tuple(sizes)
        self._read = module.program if isinstance(module, RecordedModel) else None
        self._made: dict[int, Program] = {}  # by the rows that they were made of; the first one serves all others
        self.ready: dict[int, PassForward] = {} if self._read is None else dict.fromkeys(sizes, self._read)
        self._passes = 0
        self.fresh = self.failed = False

    def has(self, rows: int) -> bool:
        """Whether a pass of so many rows is replayed, or will be once its first run has been compared."""
        return self._read is not None or (self._serves(rows) and bool(self._made))

    def _serves(self, rows: int) -> bool:
        return not self.failed and (rows in self._sizes or not rows % self._sizes[-1])

    def clear(self) -> None:
        """Does nothing: a recording does not depend on the addresses of the cache."""

    def record(self, begin: BeginPass) -> None:
        """Record a pass now, if there is no recording yet."""
        if self._read is None and not self.failed and not self._made:
            self._record(begin, ROWS)

    def run(
        self, begin: BeginPass, plan: BatchPlan, ids: Tensor, positions: Tensor, keep: Tensor | None
    ) -> PassResult | None:
        """The pass that `begin` described; None: it is not recorded (yet)."""
        if self._read is not None:
            return self._read(ids, positions, keep)
        size = ids.shape[1]
        self.fresh = False
        if keep is not None or not self._serves(size):
            return None
        if size in self.ready:
            return self.ready[size](ids, positions)
        if not self._made:
            self._passes += bool(plan.rows)
            if self._passes <= WORTH_IT:
                return None
            self._record(begin, ROWS)
            begin(plan, size)
            self.fresh = True
        return self._prove(begin, plan, size, ids, positions) if plan.rows else None

    def _record(self, begin: BeginPass, rows: int) -> None:
        ids = torch.zeros(1, rows, dtype=torch.int64)
        begin(BatchPlan([]), rows)
        try:
            self._made[rows] = program_of(trace(self._forward, ids, ids.clone()).graph)
        except Exception as error:  # of any kind: the eager path still works
            self._fail(str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}")

    def _prove(self, begin: BeginPass, plan: BatchPlan, size: int, ids: Tensor, positions: Tensor) -> PassResult:
        """Run a pass eagerly and recorded, and compare. Both write the same keys and values to the same places."""
        expected = self._forward(ids, positions)
        self.fresh = True
        while not self.failed:
            program = self._made.get(size) or next(iter(self._made.values()))
            begin(plan, size)
            if self._agrees(program, expected, plan.rows, ids, positions):
                self.ready[size] = program
                return expected
            if size in self._made:
                self._fail("its logits differ from those of the eager pass")
            else:
                self._record(begin, size)
        begin(plan, size)
        return self._forward(ids, positions)  # again: the cache holds what the recording has written

    @staticmethod
    def _agrees(program: Program, expected: PassResult, rows: int, ids: Tensor, positions: Tensor) -> bool:
        try:
            found = program(ids, positions)
        except RuntimeError:  # it contains a size that does not fit these rows
            return False
        pairs = zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True)
        return all(a.shape == b.shape and torch.equal(a[:, :rows], b[:, :rows]) for a, b in pairs)

    def _fail(self, why: str) -> None:
        self.failed = True
        self._made.clear()
        self.ready.clear()
        logger.info("passes cannot be recorded and run eagerly: %s", " ".join(why.split())[:300])


def program_of(graph: Any) -> Program:
    """A traced pass as a program.

    Raises:
        UnsupportedError: it cannot be one.
    """
    outputs = [leaf.type() for value in graph.outputs() for leaf in leaves(value)]
    if not all(found.sizes() for found in outputs):
        raise UnsupportedError("an output of the pass has no fixed width")
    return Program(graph, [], [(found.sizes()[-1], found.dtype()) for found in outputs])
