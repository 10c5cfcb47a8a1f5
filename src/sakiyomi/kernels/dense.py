"""Tree attention in plain torch, on any device: the path without a compiler, and the oracle of the compiled operator.

The operator `sakiyomi::attend` reads plan and cache of the pass from outside, so that a compiled graph knows only layer
numbers. With `by_row` every row is computed alone over its own contiguous path, which makes it
independent of the other rows (`exact=True` where no compiled kernel is); slower, the same numbers up to rounding.
"""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels.plan import Plan


class _Pass(threading.local):
    """What the operator works on. By thread: a graph compiled in the background has an empty pass of its own."""

    dense: Dense
    plan: Plan | None = None
    calls: int = 0

    def __init__(self) -> None:
        self.masks: dict[tuple[int, int, torch.device], Tensor] = {}

    def mask(self, segment: int, window: int, device: torch.device) -> Tensor:
        """The segment's mask (rows, length + rows), made once a pass, window and device."""
        assert self.plan is not None
        key = (segment, window, device)
        if key not in self.masks:
            self.masks[key] = self.plan.visible(segment, window).to(device)
        return self.masks[key]


_pass = _Pass()


class Dense:
    """The attention of one model, on its cache."""

    attention = "sakiyomi_torch"

    def __init__(self, cache: SlotCache, *, by_row: bool = False) -> None:
        self.cache, self.by_row = cache, by_row

    def begin(self, plan: Plan, size: int) -> None:
        """Say what this thread's next pass looks like; `size` counts filler rows too."""
        _pass.dense, _pass.plan, _pass.calls = self, plan, 0
        _pass.masks.clear()

    def calls(self) -> int:
        """Attention calls of this thread since `begin`."""
        return _pass.calls


def attend_all(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float) -> Tensor:
    """Queries (H, T, D), keys and values (H_kv, n, D), mask (T, n) -> (T, H, D_v).

    The query heads that share a key head are packed as rows, so that no key is copied.
    """
    heads, rows, _ = q.shape
    group = heads // keys.shape[0]
    q = q.reshape(keys.shape[0], group * rows, -1).clone()
    mask = mask.repeat(group, 1) if mask is not None else None
    if softcap:
        scores = softcap * torch.tanh((q @ keys.transpose(1, 2)).float() * (scaling / softcap))
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1).to(values.dtype) @ values
    else:
        out = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask, scale=scaling)[0]
    return out.reshape(heads, rows, -1).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int) -> Tensor:
    plan = _pass.plan
    assert plan is not None, "sakiyomi::attend called outside a pass"
    _pass.calls += 1
    dense, cache = _pass.dense, _pass.dense.cache
    out = q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
    for i, (slot, first, rows, length, prompt) in enumerate(plan.table):
        keys, values = cache.keys[layer][slot], cache.values[layer][slot]
        keys[:, length : length + rows] = k[0, :, first : first + rows]
        values[:, length : length + rows] = v[0, :, first : first + rows]
        for a, b in [(r, r + 1) for r in range(rows)] if dense.by_row and not prompt else [(0, rows)]:
            at = slice(0, length + rows)
            mask: Tensor | None = None
            if dense.by_row and not prompt:
                path = plan.path(i, a)
                columns = torch.tensor([*range(length - plan.parts[i].done), *path.tolist()], device=q.device)
                columns = columns[-window:] if window else columns
                part_keys, part_values = keys[:, columns], values[:, columns]
            else:
                mask = None if rows == 1 and not window else _pass.mask(i, window, q.device)
                part_keys, part_values = keys[:, at], values[:, at]
            part = q[0, :, first + a : first + b]
            out[0, first + a : first + b] = attend_all(part, part_keys, part_values, mask, scaling, softcap)
    return out


_library = torch.library.Library("sakiyomi", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, int layer, float scaling, float softcap, int window) -> Tensor")
_library.impl("attend", _attend, "CompositeExplicitAutograd")


@torch.library.register_fake("sakiyomi::attend", lib=_library)  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int) -> Tensor:
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])
