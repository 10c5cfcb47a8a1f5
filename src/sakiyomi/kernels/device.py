"""Tree attention for an accelerator: the plan lives in static tensors, so that passes can be captured and replayed.

Rows are laid out as `(slots, rows of a slot)`, padded to powers of two, beside the cache as it lies: one masked
attention call a layer serves all requests, and no key is copied. A CUDA graph is captured for each (rows, slots, rows
of a slot, columns); growing the cache drops them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.slots import FIRST_ROOM, SlotCache
from sakiyomi.kernels.plan import Plan

__all__ = ["CudaGraphs", "DevicePass"]


def _bucket(count: int, least: int = 1) -> int:
    """The power of two that holds `count`."""
    return max(least, 1 << max(count - 1, 0).bit_length())


@dataclass(eq=False)
class _Frame:
    """Static tensors of all passes of one shape.

    Attributes:
        slot, column: (rows,) where each row's key and value go.
        place: (rows,) the row's place in the padded layout.
        masks: sliding window -> (slots, 1, rows of a slot, columns) bool.
    """

    rows: int
    slots: int
    depth: int
    columns: int
    device: torch.device
    slot: Tensor = field(init=False)
    column: Tensor = field(init=False)
    place: Tensor = field(init=False)
    masks: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slot, self.column, self.place = (
            torch.zeros(self.rows, dtype=torch.int64, device=self.device) for _ in range(3)
        )

    def fill(self, plan: Plan, room: int) -> None:
        """Write a plan into the tensors. Filler rows go to the cache's last column, which is never a token's."""
        slot, column, place = [0] * self.rows, [room - 1] * self.rows, [0] * self.rows
        for where, first, count, length, _ in plan.table:
            for i in range(count):
                slot[first + i], column[first + i], place[first + i] = where, length + i, where * self.depth + i
        for tensor, values in ((self.slot, slot), (self.column, column), (self.place, place)):
            tensor.copy_(torch.tensor(values))
        for window in self.masks:
            self.masks[window].copy_(self._mask(plan, window))

    def mask(self, plan: Plan, window: int) -> Tensor:
        """The mask for a sliding window; made at first use, kept up to date by `fill` afterwards."""
        if window not in self.masks:
            self.masks[window] = self._mask(plan, window).to(self.device)
        return self.masks[window]

    def _mask(self, plan: Plan, window: int) -> Tensor:
        mask = torch.zeros(self.slots, 1, self.depth, self.columns, dtype=torch.bool)
        mask[..., 0] = True  # a padding row must see something, or its softmax is not a number
        for i, (slot, _, count, length, _) in enumerate(plan.table):
            mask[slot, 0, :count, 0] = False
            mask[slot, 0, :count, : length + count] = plan.visible(i, window)
        return mask


class DevicePass:
    """The cache and the static plan that attention works on in this thread."""

    attention = "sakiyomi_device"

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.count = 0
        self.frames: dict[tuple[int, int, int, int], _Frame] = {}

    def begin(self, plan: Plan, size: int) -> None:
        """Say what the next pass looks like; `size` counts filler rows too."""
        segments = plan.table or [(0, 0, 1, 0, 0)]
        slots = min(_bucket(max(slot for slot, *_ in segments) + 1), max(self.cache.slots, 1))
        depth = _bucket(max(count for _, _, count, _, _ in segments))
        columns = min(
            _bucket(max(length + count for _, _, count, length, _ in segments), FIRST_ROOM), max(self.cache.room, 1)
        )
        key = (size, slots, depth, columns)
        if key not in self.frames:
            self.frames[key] = _Frame(*key, self.cache.shapes[0].device)
        self.key, self.frame, self.plan, self.count = key, self.frames[key], plan, 0
        if plan.rows:
            self.frame.fill(plan, self.cache.room)
        _active.state = self

    def calls(self) -> int:
        """Attention calls since `begin`."""
        return self.count

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int
    ) -> Tensor:
        """Cache write and attention of one layer, (1, H, N, D) -> (1, N, H, D_v): static shapes, no synchronisation."""
        self.count += 1
        frame = self.frame
        if not self.plan.rows:
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
        for store, fresh in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
            store[frame.slot, :, frame.column] = fresh[0].transpose(0, 1)
        keys = self.cache.keys[layer][: frame.slots, :, : frame.columns]
        values = self.cache.values[layer][: frame.slots, :, : frame.columns]
        heads = q.shape[1]
        laid = q.new_zeros(frame.slots * frame.depth, heads, q.shape[3])
        # Filler rows share place 0 with a real row: they are added with weight 0 instead of overwriting it.
        real = torch.ones_like(frame.column, dtype=q.dtype).masked_fill_(frame.column == self.cache.room - 1, 0.0)
        laid.index_add_(0, frame.place, q[0].transpose(0, 1) * real[:, None, None])
        laid = laid.view(frame.slots, frame.depth, heads, -1).transpose(1, 2)
        mask = frame.mask(self.plan, window)
        if softcap:
            group = heads // keys.shape[1]
            scores = laid @ keys.repeat_interleave(group, 1).transpose(2, 3)
            scores = softcap * torch.tanh(scores.float() * (scaling / softcap))
            out = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(values.dtype) @ values.repeat_interleave(
                group, 1
            )
        else:
            out = F.scaled_dot_product_attention(laid, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
        out = out.transpose(1, 2).reshape(frame.slots * frame.depth, heads, -1)
        return out.index_select(0, frame.place)[None]


class _Active(threading.local):
    state: DevicePass | None = None


_active = _Active()


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int) -> Tensor:
    """What transformers' layers call; see `DevicePass.attend`."""
    assert _active.state is not None, "attention called outside a pass"
    return _active.state.attend(q, k, v, layer, scaling, softcap, window)


class CudaGraphs:
    """Captured passes, by the shape of their plan.

    Args:
        forward: (ids, positions) -> logits (1, N, V), eager.
        state: its static tensors are what the captured kernels read.
    """

    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor], state: DevicePass) -> None:
        self._forward, self._state = forward, state
        self._captured: dict[Any, tuple[Any, Tensor, Tensor, Tensor]] = {}
        self._pool: Any = None

    def clear(self) -> None:
        """Forget all captures: the cache's tensors have moved."""
        self._captured.clear()
        self._state.frames.clear()

    def run(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The pass that `state.begin` described; logits (1, N, V), to be read before the next pass of this shape."""
        if self._state.key not in self._captured:
            self._captured[self._state.key] = self._capture(ids, positions)
        graph, own_ids, own_positions, logits = self._captured[self._state.key]
        own_ids.copy_(ids)
        own_positions.copy_(positions)
        graph.replay()
        return logits

    def _capture(self, ids: Tensor, positions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        ids, positions = ids.clone(), positions.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries allocate and choose kernels on the first calls, which must not be captured
                self._forward(ids, positions)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(ids, positions)
        self._pool = self._pool or graph.pool()
        return graph, ids, positions, logits
