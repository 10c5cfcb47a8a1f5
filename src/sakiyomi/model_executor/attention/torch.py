"""Tree attention in plain torch on any device: used where no compiled kernels are, and the oracle of these kernels.

The operator `sakiyomi::attend` gets only the number of a layer; the backend that this thread's pass runs on has plan
and cache. With `by_row` every row is computed alone over its own contiguous path, so that it does not depend on the
other rows (`exact=True` without compiled kernels). That is slower, and gives the same numbers up to rounding.

Passes over prompts whose rows see only some columns (`sparse.py`) always run here, whichever backend runs the other
passes (`set_pass`).
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.cross_attention import SourceCache
from sakiyomi.cache.layout import Alibi, Part
from sakiyomi.cache.observations import RowObservations
from sakiyomi.cache.policies.sparse import Chunk, attend_some
from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.attention import latent
from sakiyomi.model_executor.attention.registry import AttentionBackend, BackendNeeds


class _Active(threading.local):
    """The running pass of this thread, see ``set_pass``: models run beside each other."""

    backend: TorchBackend | None = None
    over: bool = False
    notes: RowObservations | None = None
    plan: BatchPlan | None = None


_active = _Active()


class _Pass(threading.local):
    """A backend's pass, of each thread its own: a pass may begin between two layers of another thread's."""

    def __init__(self) -> None:
        self.begin(BatchPlan([]))

    def begin(self, plan: BatchPlan) -> None:
        """Forget the pass before."""
        self.plan, self.count = plan, 0
        self.masks: dict[tuple[int, int, int, torch.device], Tensor] = {}  # as they are asked for
        self.biases: dict[int, Tensor] = {}


class TorchBackend(AttentionBackend):
    """Attention of one session in plain torch: see ``AttentionBackend``."""

    operator: ClassVar[str] = "sakiyomi_torch"

    def __init__(self, needs: BackendNeeds, cache: SlotCache, sources: SourceCache | None = None) -> None:
        self.cache, self.sources = cache, sources
        self.by_row, self.distances, self.sparse = needs.exact, needs.distances, needs.sparse
        self._pass = _Pass()

    @classmethod
    def serves(cls, needs: BackendNeeds) -> bool:
        """Every model."""
        return True

    def begin(self, plan: BatchPlan, size: int) -> None:
        """Describe this thread's next pass; `size` includes filler rows."""
        _active.backend = self
        self._pass.begin(plan)
        latent.prompts_by(None)

    def calls(self) -> int:
        """Attention calls since `begin`."""
        return self._pass.count

    def _mask(self, segment: int, window: int, dropped: int, device: torch.device) -> Tensor:
        """The segment's mask (rows, columns)."""
        key = (segment, window, dropped, device)
        if key not in self._pass.masks:
            self._pass.masks[key] = self._pass.plan.visible(segment, window, device, dropped=dropped)
        return self._pass.masks[key]

    def _bias(self, segment: int, rows: int, alibi: Alibi | None, heads: slice, device: torch.device) -> Tensor | None:
        """Added to the scores of a segment's rows by these query heads, (heads, rows, columns); None: nothing is."""
        if alibi is not None:
            return alibi.scores(heads, self._pass.plan.column_positions(segment, device)).expand(-1, rows, -1)
        if self.distances is not None and segment not in self._pass.biases:
            far = self._pass.plan.distances(segment, self.distances.device).clamp_max_(self.distances.shape[1] - 1)
            self._pass.biases[segment] = self.distances[:, far]
        return self._pass.biases.get(segment)

    def write_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int
    ) -> Tensor:
        """Cache write and attention of one layer, see ``AttentionBackend.attend``."""
        self._pass.count += 1
        out = q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
        group = q.shape[1] // k.shape[1]
        for i, (slot, first, rows, _, _) in enumerate(self._pass.plan.table):
            for part in self.cache.parts(layer, slot):
                own = slice(part.heads.start * group, part.heads.stop * group)  # query heads
                at = slice(first, first + rows)
                fresh = q[0, own, at], k[0, part.heads, at], v[0, part.heads, at]
                out[0, at, own] = self._part(i, layer, part, own, fresh, scaling, softcap, window)
        return out

    def _part(
        self,
        segment: int,
        layer: int,
        part: Part,
        own: slice,
        fresh: tuple[Tensor, Tensor, Tensor],
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        """Attention of one segment over heads with equally many dropped pairs: (rows, heads, dim); writes its pairs."""
        (queries, new_keys, new_values), device = fresh, fresh[0].device
        slot, _, rows, length, prompt = self._pass.plan.table[segment]
        first = length - part.dropped
        part.keys[:, first : first + rows] = new_keys
        part.values[:, first : first + rows] = new_values
        keys, values = self.cache.columns(layer, slot, part, first + rows)
        if self.sparse is not None and prompt:
            return attend_some(self.sparse, Chunk(queries, keys, scaling, softcap, window), values)
        shape, sequence = self.cache.shapes[layer], self._pass.plan.parts[segment]
        sinks = None if shape.sinks is None else shape.sinks[own]
        bias = self._bias(segment, rows, shape.alibi, own, device)
        by_row, tree = self.by_row and not prompt, sequence.block or sequence.parents is not None
        if not (length or window or softcap or by_row or tree) and bias is None and sinks is None:
            # The beginning of a prompt needs no mask, without which torch has faster kernels.
            pairs = keys[None], values[None]
            out = F.scaled_dot_product_attention(queries[None], *pairs, is_causal=True, scale=scaling, enable_gqa=True)
            return out[0].transpose(0, 1)
        masked = rows > 1 or window or by_row
        mask = self._mask(segment, window, part.dropped - part.packed, device) if masked else None
        if mask is None or not by_row:
            return attend_all(queries, keys, values, mask, scaling, softcap, bias, sinks)
        outs = []
        for row, seen in enumerate(mask):
            pairs = keys[:, seen], values[:, seen]
            added = None if bias is None else bias[:, row : row + 1, seen]
            outs.append(attend_all(queries[:, row : row + 1], *pairs, None, scaling, softcap, added, sinks))
        return torch.cat(outs)

    def cross_attend(self, q: Tensor, layer: int, scaling: float) -> Tensor:
        """Rows over the sources of their requests, see ``AttentionBackend.cross``; zeros where nothing was read."""
        out = q.new_zeros(1, q.shape[2], q.shape[1], q.shape[3])
        sources = self.sources
        assert sources is not None, "made with an encoder's cache"
        for slot, first, rows, _, _ in self._pass.plan.table:
            count = int(sources.lengths[slot])
            if not count:
                continue
            keys, values = sources.keys[layer][slot][:, :count], sources.values[layer][slot][:, :count]
            for a, b in [(r, r + 1) for r in range(rows)] if self.by_row else [(0, rows)]:
                part = q[0, :, first + a : first + b]
                out[0, first + a : first + b] = attend_all(part, keys, values, None, scaling, 0.0)
        return out


def set_pass(*, over: bool = False, notes: RowObservations | None = None, plan: BatchPlan | None = None) -> None:
    """Set up this thread's next pass.

    Args:
        over: the ``TorchBackend`` that was begun last computes attention in the place of the model's own backend.
        notes: where the pass writes rows of numbers for the cache's policy; None: nowhere.
        plan: of the pass, for ``notes``.
    """
    _active.over, _active.notes, _active.plan = over, notes, plan


def taken_over() -> bool:
    """Whether a ``TorchBackend`` computes this thread's pass in the place of the model's own backend."""
    return _active.over


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


def _attend(*given: Any) -> Tensor:
    assert _active.backend is not None, "sakiyomi::attend called outside a pass"
    return _active.backend.write_and_attend(*given)


def _cross(*given: Any) -> Tensor:
    assert _active.backend is not None, "sakiyomi::cross called outside a pass"
    return _active.backend.cross_attend(*given)


def _observe(out: Tensor, note: Tensor, layer: int) -> Tensor:
    if _active.notes is not None and _active.plan is not None:
        _active.notes.write(layer, _active.plan, note)
    return out.clone()  # the result is used, so that no recording drops the operator as dead code


_library = torch.library.Library("sakiyomi", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, int layer, float scaling, float softcap, int window) -> Tensor")
_library.define("cross(Tensor q, int layer, float scaling) -> Tensor")
_library.define("observe(Tensor out, Tensor note, int layer) -> Tensor")
_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("cross", _cross, "CompositeExplicitAutograd")
_library.impl("observe", _observe, "CompositeExplicitAutograd")
