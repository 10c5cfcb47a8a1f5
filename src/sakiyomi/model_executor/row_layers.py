"""Layers beside a model that read a row each, as a program: the kernels run them between the passes of their rounds.

Such are an EAGLE head's projection of hidden states, Medusa's heads, and a target's head over the vocabulary where
another model's rows go through it. ``Layers`` in `kernels/growth.h` runs them.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.build import loaded
from sakiyomi.kernels.native import HALF
from sakiyomi.model_executor.program import Program
from sakiyomi.model_executor.recorded_passes import program_of
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.trace import trace

logger = logging.getLogger("sakiyomi")
_LAYERS = struct.Struct("=5q")  # Layers in growth.h
_ROWS = 256  # most rows at once
_TRIED = (8, 1, 3)  # rows of the recording, and of its comparisons


Compute = Callable[[Tensor, Tensor, Tensor], Any]
"""From rows (rows, width), tokens and positions (1, rows) of these to what layers make: (rows, out), or several."""


class RowLayers:
    """Layers of a model, or beside it on its kernels, as a program.

    Args:
        host: on whose kernels they run.
        width: of a row that they read.
        compute: they.

    Attributes:
        host: see above.
        made: numbers of a row that they make; 0: they are not recorded.
        held: what the kernels use of them, as long as somebody has ``packed``.
    """

    made = 0
    held: Any

    def __init__(self, host: ModelRunner, width: int, compute: Compute) -> None:
        self.host, self._width, self._compute = host, width, compute
        self.held = None
        self._program: Program | None = None
        self._made_for: object = None
        self._packed: bytes | None = None

    @property
    def version(self) -> object:
        """Changes when the model's kernels do: what ``packed`` has given is no longer right then."""
        return self.host.weights.generation, self.host.backend

    def reach(self, positions: int) -> None:
        """Be ready for rows of so many positions."""
        if self._program is not None:
            self._program.reach(positions)

    def packed(self) -> bytes | None:
        """The program as the kernels take it; None: these layers have none, as the log says."""
        if self._made_for != self.version:
            self._made_for, self._packed = self.version, self._make()
        return self._packed

    def _make(self) -> bytes | None:
        host = self.host
        if loaded() is None or host.backend.session is None or host.device.type != "cpu" or host.dtype not in HALF:
            return None
        try:
            with torch.no_grad(), host.lock:
                given, program = self._recorded()
        except Exception as error:  # of any kind: Python runs these layers
            logger.info("layers beside a model cannot be recorded: %s", " ".join(str(error).split())[:300])
            return None
        self._program, self.made, self.held = program, program.rows[0][0], (given, program, host.backend)
        about = program.number, host.backend.session, given.data_ptr(), _ROWS, given[0].nbytes
        return _LAYERS.pack(*about)

    def _recorded(self) -> tuple[Tensor, Program]:
        """The program, and where it reads rows. It makes the same bits as the layers, of other row counts, too.

        Raises:
            UnsupportedError: it does not.
        """
        host = self.host
        given = torch.linspace(-1, 1, _ROWS * self._width).to(host.dtype).view(_ROWS, self._width)

        def forward(ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            found = self._compute(given[: ids.shape[1]], ids, positions)
            return tuple(part[None] for part in (found if isinstance(found, tuple) else (found,)))

        program: Program | None = None
        for rows in _TRIED:
            ids, positions = torch.arange(2, 2 + rows)[None], torch.arange(rows)[None]
            host.begin(BatchPlan([]), rows)
            expected = forward(ids, positions)  # before a trace: layers may be packed anew
            if program is None:
                host.begin(BatchPlan([]), rows)
                program = program_of(trace(forward, ids, positions).graph)
            host.begin(BatchPlan([]), rows)
            made = program(ids, positions)
            if not all(map(torch.equal, (made[0], *made[1]), expected)):
                raise UnsupportedError(f"it computes something else for {rows} rows")
        assert program is not None
        return given, program
