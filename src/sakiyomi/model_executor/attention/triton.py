"""Tree attention on a GPU by our Triton kernels, in passes that are captured once for each (rows, columns).

The compiled CPU kernels write the description of a pass to pinned memory. A captured pass first reads it from there,
and at its end writes its logits to pinned memory, so that rounds run in native code on the CPU as for a model on the
CPU. No mask is made, and no capture depends on the slots of the requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sakiyomi.cache.cross_attention import SourceCache
from sakiyomi.cache.slots import FIRST_ROOM, SlotCache
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.build import native, native_at_hand
from sakiyomi.kernels.device import gpu_kernels
from sakiyomi.model_executor.attention.cuda import CudaBackend, CudaGraphs, bucket
from sakiyomi.model_executor.attention.registry import BackendNeeds, BeginPass, PassForward, PassRecorder, PassResult

MOST_ROWS = 256
"""Most rows of a captured pass."""
FIRST_NODES = 2048
"""Numbers about trees that fit into a plan at first."""


@dataclass(eq=False)
class _Frame:
    """The memory outside the model that passes of one size read and write.

    Attributes:
        host, plan: int32, the plan (see ``triton_kernels.py``), pinned and on the device.
        inputs: (2, size) int64, token ids and positions on the device.
        logits: (1, size, V), pinned; None before the first capture.
        captured: by columns: the graph, and its hidden states.
    """

    host: Tensor
    plan: Tensor
    inputs: Tensor
    logits: Tensor | None = None
    captured: dict[int, tuple[Any, tuple[Tensor, ...]]] = field(default_factory=dict)


class TritonBackend(CudaBackend):
    """Attention of a session by ``triton_kernels.attend``: see ``AttentionBackend``.

    Long prompts are read as ``CudaBackend`` reads them, by torch's own kernels.
    """

    operator: ClassVar[str] = "sakiyomi_triton"

    def __init__(self, needs: BackendNeeds, cache: SlotCache, sources: SourceCache | None = None) -> None:
        super().__init__(needs, cache, sources)
        library = native()
        assert library is not None
        self._library, self._kernels = library, gpu_kernels(needs.device)
        self.session: int = library.sk_session(0)
        self.sized: dict[int, _Frame] = {}
        self.size = self.columns = 1
        self.attach(cache)

    def __del__(self) -> None:
        self._library.sk_free_session(self.session)

    @classmethod
    def serves(cls, needs: BackendNeeds) -> bool:
        """As ``CudaBackend``, if the kernels of both devices run."""
        at_hand = super().serves(needs) and native_at_hand() and native() is not None
        return at_hand and gpu_kernels(needs.device) is not None

    def attach(self, cache: SlotCache) -> None:
        """Called when the cache has new tensors: one kernel moves the rows that commits keep."""
        if cache.room:
            stores = {store.data_ptr(): store for store in (*cache.keys, *cache.values)}
            cache.gather = self._kernels.Keeper(list(stores.values()))

    def begin(self, plan: BatchPlan, size: int) -> None:
        """Describe the next pass to the CPU's kernels and to the device."""
        if plan.prompts and size > MOST_ROWS:
            super().begin(plan, size)
            return
        self.enter(apart=False)
        self._library.sk_begin(self.session, len(plan.parts), size, plan.packed)
        frame = self.frame_of(size)
        frame.plan.copy_(frame.host, non_blocking=True)

    def frame_of(self, size: int) -> _Frame:
        """The pass that was begun, its plan written to pinned memory; sets `size` and `columns`."""
        frame = self.sized.get(size) or self._frame(size, (2 + self._kernels.FIELDS) * size + FIRST_NODES)
        plan = self._library.sk_device_plan
        while (columns := plan(size, self._kernels.TILE, len(frame.host), frame.host.data_ptr())) < 0:
            frame = self._frame(size, 2 * len(frame.host))  # captures of smaller trees go
        self.size, self.columns = size, min(bucket(columns, FIRST_ROOM), max(self.cache.room, 1))
        return frame

    def _frame(self, size: int, room: int) -> _Frame:
        host = torch.zeros(room, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        inputs = torch.zeros(2, size, dtype=torch.int64, device=self.device)
        self.sized[size] = frame = _Frame(host, torch.zeros(room, dtype=torch.int32, device=self.device), inputs)
        return frame

    def _together(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int
    ) -> Tensor:
        plan, stores = self.sized[self.size].plan, (self.cache.keys[layer], self.cache.values[layer])
        found: Tensor = self._kernels.attend(q, k, v, *stores, plan, self.columns, scaling, softcap, window)
        return found

    def recorder(self, forward: PassForward) -> PassRecorder:
        """CUDA graphs of this session's passes."""
        return TritonGraphs(forward, self)


class TritonGraphs(CudaGraphs):
    """Captured passes, by rows and columns: see ``PassRecorder``. Their logits are on the host.

    Attributes:
        ready: by row count: replays a pass that the CPU's kernels have described.
    """

    def __init__(self, forward: PassForward, backend: TritonBackend) -> None:
        super().__init__(forward, backend)
        self._passes = backend
        self.ready: Mapping[int, PassForward] = {
            size: partial(self._described, size) for size in range(1, MOST_ROWS + 1)
        }

    def has(self, rows: int) -> bool:
        """Passes of all sizes are captured at first use."""
        return not self.failed and rows <= MOST_ROWS

    def clear(self) -> None:
        """Drop all captures: the cache has new tensors."""
        for frame in self._passes.sized.values():
            frame.captured.clear()

    def run(
        self, begin: BeginPass, plan: BatchPlan, ids: Tensor, positions: Tensor, keep: Tensor | None
    ) -> PassResult | None:
        """The pass that `begin` described; None for a prompt of many rows, and where passes cannot be captured."""
        self.fresh = False
        size, backend = ids.shape[1], self._passes
        if keep is not None or backend.apart or size > MOST_ROWS or not backend.cache.room or self.failed:
            return None
        return self._replay(backend.sized[size], ids, positions)

    def _described(self, size: int, ids: Tensor, positions: Tensor) -> PassResult:
        """The pass that the CPU's kernels have described."""
        backend = self._passes
        backend.enter(apart=False)
        frame = backend.frame_of(size)
        found = None if self.failed else self._replay(frame, ids, positions)
        if found is None:
            logits, states = self._eager(frame, ids, positions)
            found = logits.cpu(), states
        return found

    def _eager(self, frame: _Frame, ids: Tensor, positions: Tensor) -> PassResult:
        """A pass whose plan lies in pinned memory."""
        for own, given in zip(frame.inputs, (ids[0], positions[0]), strict=True):
            own.copy_(given, non_blocking=True)
        frame.plan.copy_(frame.host, non_blocking=True)
        return self._forward(frame.inputs[:1], frame.inputs[1:])

    def _replay(self, frame: _Frame, ids: Tensor, positions: Tensor) -> PassResult | None:
        columns = self._passes.columns
        self.fresh = columns not in frame.captured
        if self.fresh:
            found = self._captured(ids, positions)
            if found is None:
                return None
            frame.captured[columns] = found
        graph, states = frame.captured[columns]
        device = self._passes.device
        with torch.cuda.device(device):
            graph.replay()
            torch.cuda.current_stream().synchronize()
        assert frame.logits is not None
        return frame.logits, tuple(state.clone() for state in states)

    def _capture(self, ids: Tensor, positions: Tensor) -> Any:
        frame = self._passes.sized[ids.shape[1]]

        def work() -> tuple[Tensor, ...]:
            logits, states = self._eager(frame, ids, positions)
            if frame.logits is None:
                pinned = self._passes.device.type == "cuda"
                frame.logits = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=pinned)
            frame.logits.copy_(logits, non_blocking=True)
            return states

        return self._record(work)

    def _pool(self) -> Any:
        """Memory that the captured passes share."""
        graphs = (graph for frame in self._passes.sized.values() for graph, _ in frame.captured.values())
        return next((graph.pool() for graph in graphs), None)
