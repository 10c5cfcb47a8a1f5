"""Tree attention on a GPU in plain torch. The plan lies in static tensors, so that passes can be captured.

Used on GPUs where the Triton kernels (`triton.py`) do not run.

Rows of decoding passes are laid out as `(slots, rows of a slot)`, padded to powers of two, beside the cache as it lies:
one attention call a layer serves all requests, with what a row may not see in a mask that is added to its scores. The
query heads that share a key head are packed as rows: with a mask, `enable_gqa` would copy the cache in float32 in
every layer. A CUDA graph is captured for each (rows, slots, rows of a slot, columns); growing the cache drops them.

Chunks of prompts have any length, so they are not captured, and ``TorchBackend`` computes their requests one after the
other: in the layout above a chunk would be padded to all slots below its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.cross_attention import SourceCache
from sakiyomi.cache.slots import FIRST_ROOM, SlotCache
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.attention.registry import (
    AttentionBackend,
    BackendNeeds,
    BeginPass,
    PassForward,
    PassRecorder,
    PassResult,
)
from sakiyomi.model_executor.attention.torch import TorchBackend

logger = logging.getLogger("sakiyomi")
KEPT = 64  # shapes whose tensors and captured passes are kept; each holds its own logits


def bucket(count: int, least: int = 1) -> int:
    """The power of two that holds `count`, and is not less than `least`."""
    return max(least, 1 << max(count - 1, 0).bit_length())


@dataclass(eq=False)
class _Frame:
    """Static tensors of all passes of one shape.

    Attributes:
        slot, column: (rows,) where each row's key and value go.
        place: (rows,) the row's place in the padded layout.
        row: (slots * rows of a slot,) the row at each place; any row where there is none.
        masks: by sliding window, query heads that share a key head, and dtype: (slots, 1, these heads * rows of a slot,
            columns), 0 where a row may look and -inf elsewhere.
        captured: the graph, its token ids and positions, and its results.
    """

    rows: int
    slots: int
    depth: int
    columns: int
    device: torch.device
    masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)
    captured: tuple[Any, Tensor, Tensor, Any] | None = None

    def __post_init__(self) -> None:
        sizes = (self.rows, self.rows, self.rows, self.slots * self.depth)
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=self.device)
        self.slot, self.column, self.place, self.row = self._numbers.split(sizes)

    def fill(self, plan: BatchPlan, room: int) -> None:
        """Write a plan into the tensors. Filler rows go to the cache's last column, which is never a token's."""
        slot, column, place = [0] * self.rows, [room - 1] * self.rows, [0] * self.rows
        row = [0] * (self.slots * self.depth)
        for where, first, count, length, _ in plan.table:
            slot[first : first + count] = [where] * count
            column[first : first + count] = range(length, length + count)
            place[first : first + count] = range(where * self.depth, where * self.depth + count)
            row[where * self.depth : where * self.depth + count] = range(first, first + count)
        self._numbers.copy_(torch.tensor(slot + column + place + row))
        seen = {window: self._seen(plan, window) for window, _, _ in self.masks}
        for (window, group, _), mask in self.masks.items():
            mask.copy_(_added(seen[window], group, mask.dtype))

    def mask(self, plan: BatchPlan, window: int, group: int, dtype: torch.dtype) -> Tensor:
        """One of ``masks``: made at first use, then kept up to date by `fill`."""
        key = (window, group, dtype)
        if key not in self.masks:
            self.masks[key] = _added(self._seen(plan, window), group, dtype)
        return self.masks[key]

    def _seen(self, plan: BatchPlan, window: int) -> Tensor:
        """(slots, 1, rows of a slot, columns) bool, on the device."""
        seen = torch.zeros(self.slots, 1, self.depth, self.columns, dtype=torch.bool)
        seen[..., 0] = True  # a padding row must see something, or its softmax is not a number
        for i, (slot, _, count, length, _) in enumerate(plan.table):
            seen[slot, 0, :count, 0] = False
            seen[slot, 0, :count, : length + count] = plan.visible(i, window)
        return seen.to(self.device)


def _added(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores, for query heads that are packed as rows."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf).repeat(1, 1, group, 1)


class CudaBackend(AttentionBackend):
    """Attention of one session on static tensors: see ``AttentionBackend``."""

    operator: ClassVar[str] = "sakiyomi_device"
    spare: ClassVar[int] = 1

    def __init__(self, needs: BackendNeeds, cache: SlotCache, sources: SourceCache | None = None) -> None:
        self.cache, self.device = cache, needs.device
        self.count = 0
        self.apart = False  # a prompt is in the pass: one request is computed after the other
        self.frames: dict[tuple[int, int, int, int], _Frame] = {}
        self._prompts = TorchBackend(needs, cache)

    @classmethod
    def serves(cls, needs: BackendNeeds) -> bool:
        """Causal models on one GPU whose cache keeps all pairs."""
        apart = needs.exact or needs.evicts or needs.offloaded or needs.encoder or not needs.plain
        return needs.device.type == "cuda" and needs.one_device and not apart

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int) -> Tensor:
        """Cache write and attention of one layer; see ``AttentionBackend.attend``."""
        backend = _active.backend
        assert backend is not None, "attention called outside a pass"
        backend.count += 1
        if not backend.cache.room:
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
        way = TorchBackend.attend if backend.apart else backend._together
        return way(q, k, v, layer, scaling, softcap, window)

    def recorder(self, forward: PassForward) -> PassRecorder:
        """CUDA graphs of this session's passes."""
        return CudaGraphs(forward, self)

    def begin(self, plan: BatchPlan, size: int) -> None:
        """Describe the next pass; `size` includes filler rows. Without requests all rows are filler rows."""
        self.plan = plan
        self.enter(apart=plan.prompts)
        if plan.prompts:  # no frame: a chunk of the same length may never come again
            self._prompts.begin(plan, size)
        if plan.prompts or not self.cache.room:
            return
        segments = plan.table or [(0, 0, 1, 0, 0)]
        slots = min(bucket(max(slot for slot, *_ in segments) + 1), self.cache.slots)
        depth = bucket(max(count for _, _, count, _, _ in segments))
        longest = max(length + count for _, _, count, length, _ in segments)
        key = (size, slots, depth, min(bucket(longest, FIRST_ROOM), self.cache.room))
        frame = self.frames.pop(key, None)
        self.frame = self.frames[key] = frame or _Frame(*key, self.cache.shapes[0].device)
        if len(self.frames) > KEPT:
            del self.frames[next(iter(self.frames))]  # the least recently used
        self.frame.fill(plan, self.cache.room)

    def enter(self, *, apart: bool) -> None:
        """Begin this thread's next pass on this session; ``apart``: its requests are computed one after the other."""
        self.count, self.apart = 0, apart
        _active.backend = self

    def calls(self) -> int:
        """Attention calls since `begin`."""
        return self.count

    def _together(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int
    ) -> Tensor:
        """All requests in one call: static shapes, no synchronisation."""
        frame = self.frame
        for store, fresh in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
            store[frame.slot, :, frame.column] = fresh[0].transpose(0, 1)
        keys = self.cache.keys[layer][: frame.slots, :, : frame.columns]
        values = self.cache.values[layer][: frame.slots, :, : frame.columns]
        heads, shared = q.shape[1], keys.shape[1]
        group = heads // shared
        laid = q[0].index_select(1, frame.row).view(shared, group, frame.slots, frame.depth, -1)
        laid = laid.permute(2, 0, 1, 3, 4).reshape(frame.slots, shared, group * frame.depth, -1)
        mask = frame.mask(self.plan, window, group, q.dtype)
        if softcap:
            scores = softcap * torch.tanh((laid @ keys.transpose(2, 3)).float() * (scaling / softcap))
            out = (scores + mask).softmax(-1).to(values.dtype) @ values
        else:
            out = F.scaled_dot_product_attention(laid, keys, values, attn_mask=mask, scale=scaling)
        out = out.view(frame.slots, shared, group, frame.depth, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(frame.slots * frame.depth, heads, -1).index_select(0, frame.place)[None]


class _Active(threading.local):
    backend: CudaBackend | None = None


_active = _Active()


class CudaGraphs:
    """Captured passes, by the shape of their plan: see ``PassRecorder``.

    Args:
        forward: the eager pass.
        backend: its static tensors are what the captured kernels read; what is captured is kept with them.

    Attributes:
        fresh: the last pass was captured before it ran, which takes as long as many passes.
        failed: a pass could not be captured; all passes run eagerly since then.
        ready: empty: a captured pass belongs to a plan.
    """

    mode: ClassVar[str] = "captured"
    ready: Mapping[int, PassForward] = MappingProxyType({})

    def __init__(self, forward: PassForward, backend: CudaBackend) -> None:
        self._forward, self._backend = forward, backend
        self.fresh = self.failed = False

    def has(self, rows: int) -> bool:
        """Passes of all sizes are captured at first use."""
        return not self.failed

    def record(self, begin: BeginPass) -> None:
        """Does nothing: a pass is captured when its shape first comes."""

    def clear(self) -> None:
        """Drop all captures: the cache has new tensors. Eager passes look them up."""
        self._backend.frames.clear()

    def run(
        self, begin: BeginPass, plan: BatchPlan, ids: Tensor, positions: Tensor, keep: Tensor | None
    ) -> PassResult | None:
        """The pass that `begin` described; None for prompts, which are not captured.

        The hidden states are copies, since the next replay overwrites the originals.
        """
        self.fresh = False
        if keep is not None or self._backend.apart or not self._backend.cache.room or self.failed:
            return None
        frame = self._backend.frame
        self.fresh = frame.captured is None
        if self.fresh:
            frame.captured = self._captured(ids, positions)
        if frame.captured is None:
            return None
        graph, own_ids, own_positions, (logits, states) = frame.captured
        own_ids.copy_(ids, non_blocking=True)
        own_positions.copy_(positions, non_blocking=True)
        with torch.cuda.device(own_ids.device):
            graph.replay()
        return logits, tuple(state.clone() for state in states)

    def _captured(self, ids: Tensor, positions: Tensor) -> Any:
        """The result of `_capture`; None, after one warning, if the pass cannot be captured."""
        try:
            with torch.cuda.device(self._backend.device):  # streams and graphs are those of the current device
                return self._capture(ids, positions)
        except RuntimeError as error:  # the forward waits for the device, or memory ran out
            self.failed = True
            self.clear()  # frees what the others hold
            what = " ".join(str(error).split())[:200]
            logger.warning("passes cannot be captured as CUDA graphs and run eagerly, slower: %s", what)
            self._backend.count = 0
            return None

    def _pool(self) -> Any:
        """The memory pool of the captured passes; None: none is captured."""
        captured = (frame.captured for frame in self._backend.frames.values())
        return next((found[0].pool() for found in captured if found is not None), None)

    def _capture(self, ids: Tensor, positions: Tensor) -> tuple[Any, Tensor, Tensor, PassResult]:
        device = self._backend.device
        ids, positions = ids.to(device, copy=True), positions.to(device, copy=True)
        graph, given = self._record(partial(self._forward, ids, positions))
        return graph, ids, positions, given

    def _record(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Run some work on the device twice, then capture it; the graph, and its result."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries allocate and choose kernels on the first calls, which must not be captured
                work()
        torch.cuda.current_stream().wait_stream(side)
        self._backend.count = 0  # of one forward the attention calls are counted
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate on the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool(), capture_error_mode="thread_local"):
            given = work()
        return graph, given
