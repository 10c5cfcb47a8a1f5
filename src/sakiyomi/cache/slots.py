"""The slot cache: keys and values of every running request, in one place per request.

Layers of equal (KV heads, key dim, value dim) have tensors of one shape. A slot is one request's place; its rows lie
one after the other, so rolling back is moving a length, and keeping one path of a token tree is one gather. Storage
grows by doubling and is never allocated for a model's maximal context in advance. The cache knows tokens' columns
only; it knows no model and no text.

Where pairs may be dropped, every layer and head has a limit of its own and storage for no more than that. Lengths are
those of the text all the same: a head's columns are the length less what it has dropped.

Where pairs are packed, a head's columns are [packed | full precision], and the first ones have a storage of their own
(``packed_pairs.py``). For what lies in full precision they count as dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sakiyomi.cache.mapped_files import MappedFiles
from sakiyomi.cache.quantized import GROUP, QuantizedKV
from sakiyomi.core.errors import InputError, MemoryLimitError

FIRST_ROOM = 256
STEP = 64  # columns, where doubling does not fit


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV heads, sizes of a key and of a value, the device, and the sliding window (0: none) of one attention layer."""

    heads: int
    key_dim: int
    value_dim: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    window: int = 0

    def pair_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in this layer."""
        return self.heads * (self.key_dim + self.value_dim) * itemsize


class Part(NamedTuple):
    """Heads of one layer of a slot that have dropped equally much.

    Attributes:
        heads: which.
        keys, values: (heads, room, dim) of the storage itself.
        dropped: pairs that are not there; column c holds the token at place c + dropped, or one before it.
        packed: so many of those are packed elsewhere, and come before column 0.
    """

    heads: slice
    keys: Tensor
    values: Tensor
    dropped: int
    packed: int = 0


class SlotCache:
    """Keys and values by layer, `(slots, heads, room, dim)` each, with growth and roll-back.

    Args:
        shapes: one per attention layer.
        dtype: of the stored tensors.
        max_slots: requests at once at most.
        spare: columns at the end of every slot that no token ever takes.
        extra: slots beyond those, which no request is given.
        on_move: called with the cache whenever its tensors are new ones, so that whoever keeps pointers can renew them.
        available: returns the bytes that may still be allocated; None: no limit is known.
        limits: of each layer the columns that each head ever has at once; None: no pair is dropped.
        packed: where columns before those lie that are packed; it needs limits. None: none are.
        offloaded: where its tensors' files lie; None: they are in memory.

    Attributes:
        keys, values: by layer, (slots, heads, room, dim); (slots, rows, dim) where heads have rooms of their own.
        starts: by layer, the row of a slot at which each head begins, and behind them the rows of a slot.
        dropped: (max_slots + extra, layers, heads of the largest layer) int32 on the CPU: pairs that a head of a slot
            has dropped or packed so far; None without limits.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        dtype: torch.dtype,
        max_slots: int,
        spare: int = 0,
        extra: int = 0,
        on_move: Callable[[SlotCache], None] | None = None,
        available: Callable[[], int] | None = None,
        limits: Sequence[Sequence[int]] | None = None,
        packed: QuantizedKV | None = None,
        offloaded: MappedFiles | None = None,
    ) -> None:
        self.shapes = tuple(shapes)
        self.dtype, self.max_slots, self.spare, self.extra = dtype, max_slots, spare, extra
        self.limits, self.packed = limits, packed
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.starts: list[list[int]] = []
        heads = max(shape.heads for shape in self.shapes)
        places = max_slots + extra
        self.dropped = torch.zeros(places, len(self.shapes), heads, dtype=torch.int32) if limits else None
        self._least = [0] * places  # dropped by every head
        self._absent = [0] * places  # dropped or packed by every head
        self.room = 0
        self.slots = 0
        self._free = list(range(max_slots - 1, -1, -1))
        self.on_move, self._available = on_move, available
        self._offloaded = offloaded
        self._untold = False
        self.gather: Callable[[int, int, Sequence[int]], None] | None = None
        """Moves the rows that ``keep`` keeps, where a kernel does it in one call; set whenever the tensors are new."""

    @property
    def pair_bytes(self) -> int:
        """Bytes that one token of one request takes over all layers."""
        return sum(shape.pair_bytes(self.dtype.itemsize) for shape in self.shapes)

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        return self._bytes(self.slots, self.room, self.packed.room if self.packed is not None else 0)

    def _bytes(self, slots: int, room: int, packed: int) -> int:
        if self.limits is None:
            return self.pair_bytes * slots * room
        numbers = 0
        for shape, rooms in zip(self.shapes, self._rooms(room), strict=True):
            numbers += sum(rooms) * (shape.key_dim + shape.value_dim)
        beside = self.packed.bytes(slots, packed) if self.packed is not None else 0
        return slots * numbers * self.dtype.itemsize + beside

    def held_bytes(self, slot: int, length: int) -> int:
        """Bytes of the keys and values that a slot holds of a text of so many tokens, dropped ones included: what a
        pass over it reads.
        """
        if self.dropped is None:
            return self.pair_bytes * length
        total = 0
        for layer, shape in enumerate(self.shapes):
            pair = shape.pair_bytes(self.dtype.itemsize) // shape.heads
            total += pair * (shape.heads * length - int(self.dropped[slot, layer, : shape.heads].sum()))
            if self.packed is not None:
                groups = int(self.packed.count[slot, layer, : shape.heads].sum()) // GROUP
                total += groups * self.packed.packing.group_bytes([shape]) // shape.heads
        return total

    def _rooms(self, room: int) -> list[list[int]]:
        """Columns of each layer's heads, where the largest have so many."""
        if self.limits is None:
            return [[room] * shape.heads for shape in self.shapes]
        return [[min(room, limit + self.spare) for limit in limits] for limits in self.limits]

    def least(self, slot: int) -> int:
        """Pairs that every head of a slot has dropped."""
        return self._least[slot]

    @property
    def free(self) -> int:
        """Slots that nobody has."""
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

    def clear(self, slot: int) -> None:
        """Nothing was dropped in this slot: its text begins anew."""
        if self.dropped is not None:
            self.dropped[slot] = 0
        if self.packed is not None:
            self.packed.count[slot] = 0
        self._least[slot] = self._absent[slot] = 0

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

    def reserve(self, slot: int, columns: int) -> None:
        """Make room for `columns` tokens in a slot, dropped ones included, growing all storage by doubling.

        Raises:
            MemoryLimitError: the larger storage does not fit in the memory that is left; nothing has changed then.
            InputError: the cache never holds so many at once.
        """
        if self.limits is not None and columns - self._absent[slot] > (most := max(map(max, self.limits))):
            raise InputError(
                f"{columns - self._absent[slot]} tokens in one pass, or side by side; this cache, within a budget or "
                f"packed, holds {most} of them as they are: load the model with cache='full', or a larger chunk_size"
            )
        packed = self.packed.wanted(columns - self._least[slot]) if self.packed is not None else 0
        columns -= self._absent[slot]
        if not self._holds(slot + 1, columns, packed):
            self._grow(*self._storage(slot + 1, columns, packed))
        if self._untold:
            # Before any pass, and again if Ctrl-C came in the middle: half of the pointers would be to freed memory.
            if self.on_move is not None:
                self.on_move(self)
            self._untold = False

    def check(self, requests: int, columns: int) -> None:
        """Refuse what would not fit, without allocating anything.

        Args:
            requests: at once, at most ``max_slots``.
            columns: tokens of the longest.

        Raises:
            MemoryLimitError: with the bytes needed and the length that fits.
        """
        self.needs(requests, columns)

    def needs(self, requests: int, columns: int) -> int:
        """Bytes that storage for so many requests of so many tokens will take, without allocating any.

        Raises:
            MemoryLimitError: it would not fit.
        """
        packed = self.packed.wanted(columns) if self.packed is not None else 0
        if self.limits is not None:
            columns = min(columns, max(map(max, self.limits)))
        if self._holds(requests, columns, packed):
            return self.bytes
        return self._bytes(*self._storage(requests, columns, packed))

    def _holds(self, requests: int, columns: int, packed: int) -> bool:
        """Whether the present storage is enough."""
        beside = self.packed.room if self.packed is not None else 0
        return requests <= self.slots and columns + self.spare <= self.room and packed <= beside

    def _storage(self, requests: int, columns: int, packed: int) -> tuple[int, int, int]:
        """Slots, room and packed room for so many requests of so many tokens: doubled, or, if that is too much, what is
        needed.
        """
        slots, room = max(self.slots, 1), max(self.room, FIRST_ROOM)
        beside = self.packed.room if self.packed is not None else 0
        while slots < requests:
            slots = min(slots * 2, self.max_slots + self.extra)
        while room < columns + self.spare:
            room *= 2
        while beside < packed:
            beside = max(2 * beside, FIRST_ROOM)
        if self._available is None:
            return slots, room, beside
        left = self._available()
        if self._bytes(slots, room, beside) <= left:
            return slots, room, beside
        slots, room = max(self.slots, requests), max(self.room, FIRST_ROOM, -(-(columns + self.spare) // STEP) * STEP)
        beside = max(self.packed.room, packed) if self.packed is not None else 0
        if (need := self._bytes(slots, room, beside)) > left:
            pair = self.pair_bytes
            if self.packed is not None:
                pair = max(1, (self.packed.bytes(1, 2 * GROUP) - self.packed.bytes(1, GROUP)) // GROUP)
            where = "" if self._offloaded is None else f" in {self._offloaded.folder}"
            raise MemoryLimitError(
                f"the KV cache needs {need:,} bytes for {slots} requests of {room + beside} tokens, {left:,} are "
                f"available{where}; about {left // (pair * slots)} tokens a request fit: shorten the prompt or "
                "lower max_new_tokens or max_batch"
            )
        return slots, room, beside

    def _grow(self, slots: int, room: int, packed: int) -> None:
        """Larger storage with the same contents. Interrupted, or out of memory, everything stays as it was."""
        rooms = self._rooms(room)
        starts = [[0, *itertools.accumulate(of_layer)] for of_layer in rooms]
        allocate: Callable[..., Tensor] = torch.zeros if self._offloaded is None else self._offloaded.allocate

        def larger(store: list[Tensor], dims: list[int]) -> list[Tensor]:
            fresh = []
            for layer, (shape, dim) in enumerate(zip(self.shapes, dims, strict=True)):
                even = len(set(rooms[layer])) == 1
                size = (shape.heads, rooms[layer][0]) if even else (starts[layer][-1],)
                new = allocate((slots, *size, dim), dtype=self.dtype, device=shape.device)
                if store and store[layer].ndim == new.ndim == 4:
                    new[: self.slots, :, : store[layer].shape[2]] = store[layer]
                elif store:
                    for head in range(shape.heads):
                        begin, end = self.starts[layer][head : head + 2]
                        first = starts[layer][head]
                        new.view(slots, -1, dim)[: self.slots, first : first + end - begin] = store[layer].view(
                            self.slots, -1, dim
                        )[:, begin:end]
                fresh.append(new)
            return fresh

        try:
            keys = larger(self.keys, [shape.key_dim for shape in self.shapes])
            values = larger(self.values, [shape.value_dim for shape in self.shapes])
            beside = self.packed.larger(slots, packed) if self.packed is not None else None
        except torch.OutOfMemoryError as error:  # of what an accelerator has left not every part can be used
            raise MemoryLimitError(
                f"the KV cache needs {self._bytes(slots, room, packed):,} bytes for {slots} requests of "
                f"{room + packed} tokens, and the device did not give them beside the present ones; shorten the "
                "prompt, or lower max_new_tokens or max_batch"
            ) from error
        if self.packed is not None and beside is not None:
            self.packed.take(beside, slots, packed)
        self.keys, self.values, self.starts = keys, values, starts
        self.slots, self.room, self._untold = slots, room, True
        self.gather = None  # it knows the former tensors

    def renew(self) -> None:
        """Have pointers renewed before the next pass: what is packed is read in another way from now on."""
        self._untold = True

    def keep(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Of the pass that wrote columns `length`, `length + 1`, ... keep these rows, in this order, and drop the rest.

        Args:
            slot: the request's slot.
            length: pairs that were there before the pass.
            rows: rows of the pass, counted from its first, ascending.
        """
        if all(row == i for i, row in enumerate(rows)):
            return
        if self.gather is not None:
            self.gather(slot, length, rows)
            return
        for layer in range(len(self.shapes)):
            for part in self.parts(layer, slot):
                source = torch.tensor([length - part.dropped + row for row in rows], device=part.keys.device)
                for store in (part.keys, part.values):
                    first = length - part.dropped
                    store[:, first : first + len(rows)] = store.index_select(1, source)

    def parts(self, layer: int, slot: int) -> list[Part]:
        """A slot's keys and values in one layer, in stretches of heads that have dropped equally much."""
        keys, values = self.keys[layer][slot], self.values[layer][slot]
        if self.dropped is None:
            return [Part(slice(0, keys.shape[0]), keys, values, 0)]
        heads = self.shapes[layer].heads
        dropped = self.dropped[slot, layer, :heads].tolist()
        packed = self.packed.count[slot, layer, :heads].tolist() if self.packed is not None else [0] * heads
        if keys.ndim == 3 and len(set(dropped)) == len(set(packed)) == 1:
            return [Part(slice(0, keys.shape[0]), keys, values, dropped[0], packed[0])]
        found, starts = [], self.starts[layer]
        for head, gone in enumerate(dropped):
            own = slice(starts[head], starts[head + 1])
            own_keys, own_values = (store.reshape(-1, store.shape[-1])[own][None] for store in (keys, values))
            found.append(Part(slice(head, head + 1), own_keys, own_values, gone, packed[head]))
        return found

    def columns(self, layer: int, slot: int, part: Part, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a part's packed columns and of `count` in full precision, (heads, n, dim): a copy, in the
        cache's dtype, where some are packed.
        """
        pairs = part.keys[:, :count], part.values[:, :count]
        if self.packed is None or not part.packed:
            return pairs
        packed = self.packed.read(layer, slot, part.heads, part.packed)
        keys, values = (torch.cat([first.to(self.dtype), rest], 1) for first, rest in zip(packed, pairs, strict=True))
        return keys, values

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

    def _count_absent(self, slot: int) -> None:
        assert self.dropped is not None
        used = [self.dropped[slot, layer, : shape.heads] for layer, shape in enumerate(self.shapes)]
        self._absent[slot] = int(min(int(some.min()) for some in used))
        if self.packed is not None:
            counts = self.packed.count[slot]
            used = [some - counts[layer, : len(some)] for layer, some in enumerate(used)]
        self._least[slot] = int(min(int(some.min()) for some in used))

    def drop(self, slot: int, length: int, kept: Sequence[Sequence[Tensor]]) -> None:
        """Keep these columns of a slot and free the others. Where columns are packed, of what is left as many are as in
        ``pack``.

        Args:
            slot: a request's.
            length: tokens of its text in the cache, dropped ones included.
            kept: of each layer and head the columns, packed ones first, (n,) int64, ascending.
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

    def forget(self, slot: int, dropped: Sequence[Sequence[int]]) -> None:
        """Say how many pairs each layer's heads have dropped or packed: a slot was filled from elsewhere."""
        if self.dropped is not None:
            for layer, heads in enumerate(dropped):
                self.dropped[slot, layer, : len(heads)] = torch.tensor(heads, dtype=torch.int32)
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

    def fork(self, slot: int, other: int, first: int, last: int) -> None:
        """Have a slot hold what another one holds of the first `last` tokens, copied.

        Args:
            slot, other: of this cache.
            first: so many tokens are the same already, and lie in the same places.
            last: where pairs were dropped or packed, all that the other slot's text has by now.

        Raises:
            MemoryLimitError: there is no storage for one slot more; nothing has changed then.
        """
        self.reserve(slot, 0)  # what another slot holds has room in any
        if self.dropped is not None:
            self.dropped[slot] = self.dropped[other]
            self._least[slot], self._absent[slot] = self._least[other], self._absent[other]
            first = 0
        if self.packed is not None:
            self.packed.count[slot] = self.packed.count[other]
        for layer in range(len(self.shapes)):
            for mine, theirs in zip(self.parts(layer, slot), self.parts(layer, other), strict=True):
                own = slice(first, last - theirs.dropped)
                mine.keys[:, own], mine.values[:, own] = theirs.keys[:, own], theirs.values[:, own]
                if self.packed is not None:
                    self.packed.copy(layer, slot, other, theirs.heads, theirs.packed)

    def copy(self, slot: int, first: int, last: int, source: SlotCache, other: int) -> None:
        """Take the pairs of places [first, last) from another cache, see ``excerpt``."""
        at = first - self._least[slot]
        for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for layer, store in enumerate(theirs):
                mine[layer][slot, :, at : at + last - first] = store[other, :, first:last]
