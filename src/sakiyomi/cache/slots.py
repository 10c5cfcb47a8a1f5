"""The slot cache: assigns slots to requests, and holds keys, values and other states of all layers.

Every operation on a slot goes through ``SlotCache`` to every ``LayerState``. The cache knows columns of tokens, but no
model and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sakiyomi.cache.kv_store import KVStore
from sakiyomi.cache.layer_state import LayerStates, begin_pass
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.mapped_files import MappedFiles
from sakiyomi.cache.quantized import QuantizedKV
from sakiyomi.cache.sizing import FIRST_ROOM, Sizing
from sakiyomi.core.errors import InputError, MemoryLimitError
from sakiyomi.kernels.batch import BatchPlan

__all__ = ["FIRST_ROOM", "SlotCache"]


class SlotCache(KVStore):
    """Slots for requests, and what all layers keep of the text in each.

    Args:
        shapes: one per attention layer.
        dtype: of the stored tensors.
        max_slots: requests at once at most.
        spare: columns at the end of every slot that no token ever takes.
        extra: slots beyond those, which no request is given.
        on_move: called with the cache after its tensors are reallocated, so that holders of pointers can renew them.
        available: returns the bytes that may still be allocated; None: no limit is known.
        limits: of each layer the columns that each head ever has at once; None: no pair is dropped.
        packed: where columns before those lie that are quantized; it needs limits. None: none are.
        offloaded: where its tensors' files lie; None: they are in memory.
        states: what layers without keys and values keep, see ``make_states``.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        dtype: torch.dtype,
        max_slots: int,
        spare: int = 0,
        extra: int = 0,
        on_move: Callable[[Any], None] | None = None,
        available: Callable[[], int] | None = None,
        limits: Sequence[Sequence[int]] | None = None,
        packed: QuantizedKV | None = None,
        offloaded: MappedFiles | None = None,
        states: LayerStates | None = None,
    ) -> None:
        sizing = Sizing(tuple(shapes), dtype, max_slots + extra, spare, limits, packed, available, offloaded)
        super().__init__(sizing, on_move)
        self.max_slots, self.extra = max_slots, extra
        self.states = states or LayerStates()
        self._free = list(range(max_slots - 1, -1, -1))

    # ------------------------------------------------------------ who has a slot

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot, empty.

        Raises:
            InputError: there is none.
        """
        if not self._free:
            raise InputError(
                f"all {self.max_slots} places of the cache are taken by requests and conversations; wait for their "
                "end, close a conversation, or load with a larger max_batch"
            )
        self._free.sort(reverse=True)
        slot = self._free.pop()
        self.clear(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; its storage is used again by the next request."""
        self._free.append(slot)

    @contextmanager
    def lent(self, columns: int) -> Iterator[int]:
        """A slot with room for so many tokens, for a pass that belongs to no request; it comes back with the block."""
        beyond = not self._free and self.extra > 0
        slot = self.max_slots if beyond else self.take()
        try:
            self.reserve(slot, columns)
            yield slot
        finally:
            if not beyond:
                self.release(slot)

    # ------------------------------------------------------------ what all layers keep

    def begin(self, plan: BatchPlan | None) -> None:
        """Describe this thread's next pass to layers without keys and values; None: the pass is over."""
        if self.states.stores:
            begin_pass(plan, self.states)

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        return super().bytes + sum(state.bytes for state in self.states.stores)

    def reserve(self, slot: int, columns: int) -> None:
        """Make room for `columns` tokens in a slot, see ``KVStore.reserve``."""
        super().reserve(slot, columns)
        for state in self.states.stores:
            state.reserve(slot, columns)

    def has_room(self, slot: int, columns: int) -> bool:
        """``reserve``; False where there is no memory for it."""
        try:
            self.reserve(slot, columns)
        except MemoryLimitError:
            return False
        return True

    def clear(self, slot: int) -> None:
        """A text begins in this slot."""
        super().clear(slot)
        for state in self.states.stores:
            state.clear(slot)

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Of a pass's rows keep these, see ``KVStore.commit``."""
        super().commit(slot, length, rows)
        for state in self.states.stores:
            state.commit(slot, length, rows)

    def resumable(self, slot: int, length: int, multiple: int = 1) -> int:
        """The longest beginning of at most `length` tokens, a multiple of `multiple`, that all layers can continue."""
        length -= length % multiple
        for state in self.states.stores:
            if (found := state.resumable(slot, length)) < length:
                return self.resumable(slot, found, multiple)
        return length

    def resume(self, slot: int, length: int, multiple: int = 1) -> int:
        """Roll a slot back to the length that ``resumable`` gives, and return that."""
        if not self.states.stores:
            return length - length % multiple
        length = self.resumable(slot, length, multiple)
        self.roll_back(slot, length)
        return length

    def roll_back(self, slot: int, length: int) -> None:
        """Forget what lies behind so many tokens, a length that is resumable."""
        for state in self.states.stores:
            state.roll_back(slot, length)

    def fork(self, slot: int, other: int, first: int, last: int) -> None:
        """Copy what another slot holds of its first `last` tokens, which are resumable there; see ``KVStore``."""
        super().fork(slot, other, first, last)
        for state in self.states.stores:
            state.fork(slot, other, first, last)

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """A copy of what a slot holds of its first so many tokens, by name."""
        known = super().snapshot(slot, length)
        for i, state in enumerate(self.states.stores):
            known |= {f"state.{i}.{name}": tensor for name, tensor in state.snapshot(slot, length).items()}
        return known

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Fill an empty slot with what ``snapshot`` gave."""
        super().restore(slot, length, known)
        for i, state in enumerate(self.states.stores):
            mine = f"state.{i}."
            state.restore(
                slot, length, {name.removeprefix(mine): own for name, own in known.items() if name.startswith(mine)}
            )

    # ------------------------------------------------------------ eviction of pairs

    def pack(self, slot: int, length: int) -> None:
        """Pack whole groups of a slot's columns that lie far enough before its end; nothing without ``packed``.

        Args:
            slot: a request's.
            length: tokens of its text in the cache, dropped ones included.
        """
        packed = self.packed
        if packed is None:
            return
        assert self.dropped is not None
        for layer in range(len(self.shapes)):
            for part in self.parts(layer, slot):
                held = length - part.dropped
                more = packed.packing.columns(part.packed + held) - part.packed
                if more <= 0:
                    continue
                packed.append(layer, slot, part.heads, part.keys[:, :more], part.values[:, :more])
                for store in (part.keys, part.values):
                    store[:, : held - more] = store[:, more:held].clone()
                self.dropped[slot, layer, part.heads] += more
        self._count_absent(slot)

    def drop(self, slot: int, length: int, kept: Sequence[Sequence[Tensor]]) -> None:
        """Keep these columns of a slot and free the others; of what is left as many are quantized as by ``pack``.

        Args:
            slot: a request's.
            length: tokens of its text in the cache, dropped ones included.
            kept: of each layer and head the columns, quantized ones first, (n,) int64, ascending.
        """
        assert self.dropped is not None, "a cache without limits drops nothing"
        for layer, of_layer in enumerate(kept):
            for part in self.parts(layer, slot):
                columns = torch.stack([of_layer[head] for head in range(part.heads.start, part.heads.stop)])
                first = 0 if self.packed is None else self.packed.packing.columns(columns.shape[1])
                count = columns.shape[1] - first
                pairs = part.keys, part.values
                if self.packed is not None and (first or part.packed):
                    packed = self.packed.read(layer, slot, part.heads, part.packed)
                    held = length - part.dropped
                    pairs = tuple(torch.cat([a, b[:, :held]], 1) for a, b in zip(packed, pairs, strict=True))  # type: ignore[assignment]
                keys, values = (
                    pair.gather(1, columns.to(pair.device)[..., None].expand(-1, -1, pair.shape[2])) for pair in pairs
                )
                if self.packed is not None:
                    own = columns[:, :first], keys[:, :first], values[:, :first]
                    self.packed.rewrite(layer, slot, part.heads, *own)
                part.keys[:, :count], part.values[:, :count] = keys[:, first:], values[:, first:]
                self.dropped[slot, layer, part.heads] = length - count
        self._count_absent(slot)

    def excerpt(self, slot: int, length: int, source: SlotCache, other: int, columns: Sequence[Tensor]) -> None:
        """Have a slot hold these pairs of another cache and nothing else, as if the rest of the text were dropped.

        Args:
            slot: of this cache; there must be room.
            length: tokens of the text.
            source: of equal shapes, of which nothing was dropped.
            other: the slot there.
            columns: of each layer (heads, n) int64, ascending; n may differ by layer.
        """
        assert self.dropped is not None, "a cache without limits drops nothing"
        for layer, chosen in enumerate(columns):
            count = chosen.shape[1]
            for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
                store = theirs[layer][other]
                heads, room, dim = store.shape
                # Whole rows are copied at once; gather would go number by number.
                rows = chosen.to(store.device) + torch.arange(heads, device=store.device)[:, None] * room
                found = store.reshape(-1, dim).index_select(0, rows.flatten())
                mine[layer][slot, :, :count] = found.view(heads, count, dim)
            self.dropped[slot, layer] = length - count
        self._count_absent(slot)

    def copy(self, slot: int, first: int, last: int, source: SlotCache, other: int) -> None:
        """Take the pairs of places [first, last) from another cache, see ``excerpt``."""
        at = first - self._least[slot]
        for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for layer, store in enumerate(theirs):
                mine[layer][slot, :, at : at + last - first] = store[other, :, first:last]
