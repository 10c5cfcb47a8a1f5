"""Tree attention in plain torch, on any device: the path without a compiler, and the oracle of the compiled operator.

The operator `sakiyomi::attend` reads plan and cache of the pass from outside, so that a recorded pass knows only layer
numbers. With `by_row` every row is computed alone over its own contiguous path, which makes it
independent of the other rows (`exact=True` where no compiled kernel is); slower, the same numbers up to rounding.

Where it is said which columns the rows of a prompt look at (`sparse.py`), those passes come here, whichever operator
has the others (`take_over`).
"""

from __future__ import annotations

import threading
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.cross_attention import SourceCache
from sakiyomi.cache.layout import Part
from sakiyomi.cache.policies.sparse import Chunk, attend_some
from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.attention import latent
from sakiyomi.model_executor.attention.registry import AttentionBackend, BackendNeeds


class _Pass(threading.local):
    """What the operator works on. By thread: models run beside each other."""

    dense: TorchBackend
    plan: BatchPlan | None = None
    calls: int = 0
    over: bool = False

    def __init__(self) -> None:
        self.masks: dict[tuple[int, int, int, torch.device], Tensor] = {}
        self.biases: dict[int, Tensor] = {}

    def mask(self, segment: int, window: int, dropped: int, device: torch.device) -> Tensor:
        """The segment's mask (rows, columns), made once a pass, window, number of dropped pairs and device."""
        assert self.plan is not None
        key = (segment, window, dropped, device)
        if key not in self.masks:
            self.masks[key] = self.plan.visible(segment, window, device, dropped=dropped)
        return self.masks[key]

    def bias(self, segment: int, table: Tensor) -> Tensor:
        """What is added to the scores of a segment's rows, (heads, rows, length + rows), made once a pass."""
        assert self.plan is not None
        if segment not in self.biases:
            far = self.plan.distances(segment, table.device).clamp_max_(table.shape[1] - 1)
            self.biases[segment] = table[:, far]
        return self.biases[segment]


_pass = _Pass()


class TorchBackend(AttentionBackend):
    """Attention of one session in plain torch: see ``AttentionBackend``."""

    operator: ClassVar[str] = "sakiyomi_torch"

    def __init__(self, needs: BackendNeeds, cache: SlotCache, sources: SourceCache | None = None) -> None:
        self.cache, self.sources = cache, sources
        self.by_row, self.distances, self.sparse = needs.exact, needs.distances, needs.sparse

    @classmethod
    def serves(cls, needs: BackendNeeds) -> bool:
        """Every model."""
        return True

    def begin(self, plan: BatchPlan, size: int) -> None:
        """Say what this thread's next pass looks like; `size` counts filler rows too."""
        _pass.dense, _pass.plan, _pass.calls = self, plan, 0
        latent.prompts_by(None)
        _pass.masks.clear()
        _pass.biases.clear()

    def calls(self) -> int:
        """Attention calls of this thread since `begin`."""
        return _pass.calls


def take_over(dense: TorchBackend | None) -> None:
    """Have this thread's next pass computed by this backend, which has begun it; None: by the model's own."""
    _pass.over = dense is not None


def taken_over() -> bool:
    """Whether it is."""
    return _pass.over


def attend_all(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries (H, T, D), keys and values (H_kv, n, D), mask (T, n), bias (H, T, n), sinks (H,) -> (T, H, D_v).

    The query heads that share a key head are packed as rows, so that no key is copied. With a bias there is no softcap.
    """
    heads, rows, _ = q.shape
    group = heads // keys.shape[0]
    q = q.reshape(keys.shape[0], group * rows, -1).clone()
    mask = mask.repeat(group, 1) if mask is not None else None
    if bias is not None:
        bias = bias.reshape(keys.shape[0], group * rows, -1).to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if softcap or sinks is not None:
        scores = (q @ keys.transpose(1, 2)).float() * (scaling / (softcap or 1.0))
        scores = softcap * torch.tanh(scores) if softcap else scores
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if bias is None else scores + mask
        if sinks is not None:  # a column more, without a value
            aside = sinks.view(-1, group, 1).expand(-1, -1, rows).reshape(-1, group * rows, 1)
            scores = torch.cat([scores, aside.to(scores)], -1)
        out = scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype) @ values
    else:
        out = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask, scale=scaling)[0]
    return out.reshape(heads, rows, -1).transpose(0, 1)


def _attend_part(
    dense: TorchBackend,
    plan: BatchPlan,
    segment: int,
    layer: int,
    part: Part,
    fresh: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    softcap: float,
    window: int,
    *,
    alone: bool,
) -> Tensor:
    """Attention of one segment over heads with equally many dropped pairs: (rows, heads, dim); writes its pairs."""
    (queries, new_keys, new_values), rows = fresh, fresh[0].shape[1]
    slot, _, _, length, _ = plan.table[segment]
    first = length - part.dropped
    part.keys[:, first : first + rows] = new_keys
    part.values[:, first : first + rows] = new_values
    keys, values = dense.cache.columns(layer, slot, part, first + rows)
    if dense.sparse is not None and not alone:
        return attend_some(dense.sparse, Chunk(queries, keys, scaling, softcap, window), values)
    gone = part.dropped - part.packed
    shape, group = dense.cache.shapes[layer], queries.shape[0] // keys.shape[0]
    own = slice(part.heads.start * group, part.heads.stop * group)  # query heads
    sinks = None if shape.sinks is None else shape.sinks[own]
    by_row, tree = dense.by_row and alone, plan.parts[segment].block or plan.parts[segment].parents is not None
    bias = _pass.bias(segment, dense.distances) if dense.distances is not None else None
    if shape.alibi is not None:
        bias = shape.alibi.scores(own, plan.column_positions(segment, queries.device)).expand(-1, rows, -1)
    if not (length or window or softcap or by_row or tree) and bias is None and sinks is None:
        # The beginning of a prompt needs no mask, without which torch has faster kernels.
        pairs = keys[None], values[None]
        found = F.scaled_dot_product_attention(queries[None], *pairs, is_causal=True, scale=scaling, enable_gqa=True)
        return found[0].transpose(0, 1)
    mask = _pass.mask(segment, window, gone, queries.device) if rows > 1 or window or by_row else None
    if mask is None or not by_row:
        return attend_all(queries, keys, values, mask, scaling, softcap, bias, sinks)
    outs = []
    for row, seen in enumerate(mask):
        pairs = keys[:, seen], values[:, seen]
        added = None if bias is None else bias[:, row : row + 1, seen]
        outs.append(attend_all(queries[:, row : row + 1], *pairs, None, scaling, softcap, added, sinks))
    return torch.cat(outs)


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int) -> Tensor:
    plan = _pass.plan
    assert plan is not None, "sakiyomi::attend called outside a pass"
    _pass.calls += 1
    dense, cache = _pass.dense, _pass.dense.cache
    out = q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
    group = q.shape[1] // k.shape[1]
    for i, (slot, first, rows, _, prompt) in enumerate(plan.table):
        for part in cache.parts(layer, slot):
            own = slice(part.heads.start * group, part.heads.stop * group)
            heads, at = part.heads, slice(first, first + rows)
            fresh = q[0, own, at], k[0, heads, at], v[0, heads, at]
            out[0, at, own] = _attend_part(
                dense, plan, i, layer, part, fresh, scaling, softcap, window, alone=not prompt
            )
    return out


def _cross(q: Tensor, layer: int, scaling: float) -> Tensor:
    """Rows over the sources of their requests; zeros where nothing was read."""
    plan, dense = _pass.plan, _pass.dense
    assert plan is not None, "sakiyomi::cross called outside a pass"
    out = q.new_zeros(1, q.shape[2], q.shape[1], q.shape[3])
    sources = dense.sources
    for slot, first, rows, _, _ in plan.table if sources is not None else ():
        assert sources is not None
        count = int(sources.lengths[slot])
        if not count:
            continue
        keys, values = sources.keys[layer][slot][:, :count], sources.values[layer][slot][:, :count]
        for a, b in [(r, r + 1) for r in range(rows)] if dense.by_row else [(0, rows)]:
            part = q[0, :, first + a : first + b]
            out[0, first + a : first + b] = attend_all(part, keys, values, None, scaling, 0.0)
    return out


_library = torch.library.Library("sakiyomi", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, int layer, float scaling, float softcap, int window) -> Tensor")
_library.define("cross(Tensor q, int layer, float scaling) -> Tensor")
_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("cross", _cross, "CompositeExplicitAutograd")
