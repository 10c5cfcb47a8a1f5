"""The compiled CPU kernels as an attention backend: one session of a model's packed weights on one cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sakiyomi.cache.cross_attention import SourceCache
from sakiyomi.cache.recurrent_store import RecurrentStore
from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.native import numbers, pointer
from sakiyomi.model_executor.attention import latent
from sakiyomi.model_executor.attention.registry import AttentionBackend, BackendNeeds

MOST_PARTS = 5  # tensors of a row of a recurrence, see recurrent.h


class CpuBackend(AttentionBackend):
    """Attention by `sakiyomi_cpu::attend`, which reads plan and cache from a session set before the pass.

    Args:
        needs: with the packed weights that the session is on.
        cache, sources: see ``AttentionBackend``.
    """

    operator: ClassVar[str] = "sakiyomi_cpu"
    library: ClassVar[str] = "sakiyomi_cpu"
    runs_packed: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __init__(self, needs: BackendNeeds, cache: SlotCache, sources: SourceCache | None = None) -> None:
        assert needs.packed is not None
        self._weights = needs.packed  # held: the session points to them
        self._library = needs.packed.library
        self.session: int = self._library.sk_session(needs.packed.number)
        self._distances = needs.distances  # held, too
        if needs.distances is not None:
            self._library.sk_distances(self.session, needs.distances.data_ptr(), needs.distances.shape[1])
        self.attach(cache)
        if sources is not None:
            self.attach_sources(sources)

    def __del__(self) -> None:
        self._library.sk_free_session(self.session)

    @classmethod
    def serves(cls, needs: BackendNeeds) -> bool:
        """Whether the model's linear layers are packed for the kernels."""
        return needs.packed is not None

    def attach(self, cache: SlotCache) -> None:
        """Point the kernels at the cache's present tensors."""
        self._cache = cache  # held, too
        for store in cache.states.stores:
            if isinstance(store, RecurrentStore):
                store.kernels = self
                self.attach_states(store)
        if not cache.room:
            return
        library, session = self._library, self.session
        for i in range(len(cache.shapes)):
            self._attach_layer(i)
        dropped, packed = cache.dropped, cache.packed
        library.sk_dropped(session, pointer(dropped), 0 if dropped is None else dropped.shape[2])
        if packed is None or not packed.stores[0]:
            library.sk_packed_count(session, None)
        else:
            for i in range(len(cache.shapes)):
                stores = map(pointer, packed.uniform(i))
                library.sk_packed(session, i, *stores, packed.rooms(packed.room)[i], packed.bits)
                tables, counts = packed.leveled(i)
                if tables:
                    library.sk_leveled(session, i, *map(pointer, tables), *counts)
            library.sk_packed_count(session, packed.count.data_ptr())
        cache.gather = self._keep

    def _attach_layer(self, i: int) -> None:
        cache, shape = self._cache, self._cache.shapes[i]
        starts, half = numbers(cache.starts[i]), int(cache.dtype == torch.bfloat16)
        pointers = cache.keys[i].data_ptr(), cache.values[i].data_ptr()
        self._library.sk_layer(self.session, i, *pointers, shape.heads, starts, shape.key_dim, shape.value_dim, half)
        slopes, unit, coarse = shape.alibi or (None, 1.0, False)
        self._library.sk_layer_scores(self.session, i, pointer(shape.sinks), pointer(slopes), unit, coarse)

    def _keep(self, slot: int, first: int, rows: Sequence[int]) -> None:
        self._library.sk_keep(self.session, slot, first, len(rows), numbers(rows))

    def attach_sources(self, sources: SourceCache) -> None:
        """Point cross-attention at the present tensors of what it reads."""
        self._sources = sources
        if not sources.room:
            return
        lengths, half = sources.lengths.data_ptr(), int(sources.dtype == torch.bfloat16)
        for i, (shape, keys, values) in enumerate(zip(sources.shapes, sources.keys, sources.values, strict=True)):
            pointers, starts = (keys.data_ptr(), values.data_ptr()), numbers(sources.starts[i])
            sizes = shape.key_dim, shape.value_dim, half
            self._library.sk_source(self.session, i, *pointers, shape.heads, starts, *sizes, lengths)

    def begin(self, plan: BatchPlan, size: int) -> None:
        """Describe this session's next pass; `size` includes filler rows."""
        self._library.sk_begin(self.session, len(plan.parts), size, plan.packed)
        latent.prompts_by(functools.partial(self._expanded, plan) if plan.prompts else None)

    def _expanded(
        self, plan: BatchPlan, module: nn.Module, q: Tensor, latents: Tensor, layer: int, *asked: Any
    ) -> Tensor | None:
        """See ``latent.Expanded``: for this call the kernels read expanded keys and values."""
        cache, ends = self._cache, [length + rows for _, _, rows, length, _ in plan.table]
        pairs, most = sum(rows * (length + rows / 2) for _, _, rows, length, _ in plan.table), max(ends)
        if cache.dropped is not None or not latent.expanding_is_faster(module, pairs, sum(ends)):
            return None
        fresh = latent.expand(module, latents[0, 0])
        heads, slots = q.shape[1], 1 + max(slot for slot, *_ in plan.table)
        room = [q.new_empty(slots, heads, most, part.shape[2]) for part in fresh]  # of other slots no page is touched
        for slot, first, rows, length, _ in plan.table:
            kept = cache.keys[layer][slot][0]
            kept[length : length + rows] = latents[0, 0, first : first + rows]
            for place, part in zip(room, latent.expand(module, kept[:length]), strict=True):
                place[slot, :, :length] = part
        starts, sizes = numbers([head * most for head in range(heads + 1)]), [part.shape[2] for part in fresh]
        pointers, half = [part.data_ptr() for part in room], int(q.dtype == torch.bfloat16)
        self._library.sk_layer(self.session, layer, *pointers, heads, starts, *sizes, half)
        try:
            return self.attend(q, fresh[0][None], fresh[1][None], layer, *asked)
        finally:
            self._attach_layer(layer)

    def want(self, rows: Tensor, layers: int) -> None:
        """See ``AttentionBackend``."""
        self._library.sk_want(len(rows), rows.data_ptr(), layers - 1)

    def calls(self) -> int:
        """Attention calls since `begin`."""
        return int(self._library.sk_calls())

    def attach_states(self, store: RecurrentStore) -> None:
        """Point the kernels at the present tensors of recurrent states, see ``SiteKernels``."""
        for number, state in store.sites.items():
            site = state.site
            parts = [math.prod(shape) for shape in site.rows]
            sizes = [math.prod(site.state), state.rows.shape[1], site.width, site.kind.kept]
            sizes += [*parts, *[0] * (MOST_PARTS - len(parts)), *site.kind.kernel_shape(site), site.around]
            tensors = state.states.data_ptr(), state.rows.data_ptr(), state.at.ctypes.data, store.first.ctypes.data
            self._library.sk_site(self.session, number, site.kind.kernel, *tensors, numbers(sizes))

    def fold(self, slot: int, length: int) -> None:
        """See ``SiteKernels``."""
        self._library.sk_fold(self.session, slot, length)

    def keep_rows(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """See ``SiteKernels``."""
        self._library.sk_keep_rows(self.session, slot, length, len(rows), numbers(rows))
