"""Keys and values of attention layers by slot: tensors that grow, the first kind of ``LayerState``.

Layers with equal (KV heads, key dim, value dim) have tensors of one shape. A slot's rows are contiguous, so rolling
back only changes a length, and keeping one path of a token tree is one gather. Storage grows by doubling and is never
allocated for a model's maximal context in advance.

Where pairs may be dropped, every layer and head has its own limit and storage for no more. Lengths still count tokens
of the text: a head's columns are the length minus the pairs that it has dropped.

Where pairs are quantized, a head's columns are [quantized | full precision]. The quantized ones have their own storage
(``quantized.py``) and count as dropped in this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sakiyomi.cache.layout import Part
from sakiyomi.cache.quantized import GROUP
from sakiyomi.cache.sizing import Size, Sizing
from sakiyomi.core.errors import InputError, MemoryLimitError


class KVStore:
    """Keys and values by layer, with growth.

    Args:
        sizing: shapes, limits, and the memory that there is.
        on_move: called with the store after its tensors are reallocated, so that holders of pointers can renew them.

    Attributes:
        keys, values: by layer, (slots, heads, room, dim); (slots, rows, dim) where heads have rooms of their own. Of
            layers that store nothing (see ``LayerShape``) they are those of another, and tied values are the keys.
        starts: by layer, the row of a slot at which each head begins, and behind them the rows of a slot.
        dropped: (slots at most, layers, heads of the largest layer) int32 on the CPU: pairs that a head of a slot has
            dropped or quantized so far; None without limits.
        packed: where quantized columns lie; None: none ever are.
        slots, room: of the tensors; room in columns of the largest heads.
        moved: the tensors were reallocated and ``on_move`` was not called yet; the next ``reserve`` calls it.
        gather: a kernel that moves the rows that ``commit`` keeps in one call; set by ``on_move``.
    """

    def __init__(self, sizing: Sizing, on_move: Callable[[Any], None] | None = None) -> None:
        self.sizing, self.shapes, self.dtype = sizing, sizing.shapes, sizing.dtype
        self.packed = sizing.packed
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.starts: list[list[int]] = []
        heads, most = max((shape.heads for shape in self.shapes), default=0), sizing.max_slots
        limited = sizing.limits is not None
        self.dropped = torch.zeros(most, len(self.shapes), heads, dtype=torch.int32) if limited else None
        self._least = [0] * most  # dropped by every head
        self._absent = [0] * most  # dropped or quantized by every head
        self.room = self.slots = 0
        self._roomy = -1  # columns for which every slot has room in any case
        self.on_move, self.moved = on_move, False
        self.gather: Callable[[int, int, Sequence[int]], None] | None = None

    # ------------------------------------------------------------ sizes

    @property
    def size(self) -> Size:
        """Of the present storage."""
        return Size(self.slots, self.room, self.packed.room if self.packed is not None else 0)

    @property
    def pair_bytes(self) -> int:
        """Bytes that one token of one request takes over all layers."""
        return self.sizing.pair_bytes

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        return self.sizing.bytes(self.size)

    def held_bytes(self, slot: int, length: int) -> int:
        """Bytes of the keys and values that a slot holds of a text of so many tokens: what a pass over it reads."""
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

    def capacity(self, slots: int, columns: int) -> int:
        """What ``held_bytes`` of so many slots come to at most, where texts have so many tokens."""
        most = self.sizing.most
        room = columns if most is None else min(columns, most)
        return self.sizing.bytes(Size(slots, room, self.sizing.packed_columns(columns)))

    def least(self, slot: int) -> int:
        """Pairs that every head of a slot has dropped."""
        return self._least[slot]

    def reserve(self, slot: int, columns: int) -> None:
        """Make room for `columns` tokens in a slot, dropped ones included, growing all storage by doubling.

        Raises:
            MemoryLimitError: the larger storage does not fit in the memory that is left; nothing has changed then.
            InputError: the cache never holds so many at once.
        """
        if slot < self.slots and columns <= self._roomy and not self.moved:
            return
        most, present = self.sizing.most, columns - self._absent[slot]
        if most is not None and present > most:
            raise InputError(
                f"{present} tokens in one pass, or side by side; this cache, within a budget or "
                f"packed, holds {most} of them as they are: load the model with cache='full', or a larger chunk_size"
            )
        packed = self.sizing.packed_columns(columns - self._least[slot])
        if not self.sizing.holds(self.size, slot + 1, present, packed):
            self._grow(self.sizing.grown(self.size, slot + 1, present, packed))
        if self.moved:
            # Before any pass, and again if Ctrl-C came in the middle: half of the pointers would be to freed memory.
            if self.on_move is not None:
                self.on_move(self)
            self.moved = False

    def needs(self, requests: int, columns: int) -> int:
        """Bytes that storage for so many requests of so many tokens will take, without allocating any.

        Raises:
            MemoryLimitError: it would not fit; with the bytes needed and the length that fits.
        """
        packed, most = self.sizing.packed_columns(columns), self.sizing.most
        columns = columns if most is None else min(columns, most)
        if self.sizing.holds(self.size, requests, columns, packed):
            return self.bytes
        return self.sizing.bytes(self.sizing.grown(self.size, requests, columns, packed))

    def _grow(self, size: Size) -> None:
        """Larger storage with the same contents. Interrupted, or out of memory, everything stays as it was."""
        slots, room, packed = size
        rooms = self.sizing.rooms(room)
        try:
            keys = _larger(self, self.keys, "keys", slots, rooms)
            values = _larger(self, self.values, "values", slots, rooms, keys)
            packed_columns = self.packed.larger(slots, packed) if self.packed is not None else None
        except torch.OutOfMemoryError as error:  # of what an accelerator has left not every part can be used
            raise MemoryLimitError(
                f"the KV cache needs {self.sizing.bytes(size):,} bytes for {slots} requests of "
                f"{room + packed} tokens, and the device did not give them beside the present ones; shorten the "
                "prompt, or lower max_new_tokens or max_batch"
            ) from error
        if self.packed is not None and packed_columns is not None:
            self.packed.take(packed_columns, slots, packed)
        self.keys, self.values, self.starts = keys, values, list(map(_starts, rooms))
        self.slots, self.room, self.moved = slots, room, True
        self._roomy = room - self.sizing.spare if self.sizing.limits is None and self.packed is None else -1
        self.gather = None  # it holds pointers to the former tensors

    def shed(self) -> None:
        """Give storage back that no request needs any more; nothing is done where columns may be quantized."""
        if self.packed is None:
            self.keys, self.values, self.starts = [], [], []
            self.slots = self.room = 0
            self._roomy, self.moved, self.gather = -1, True, None

    def renew(self) -> None:
        """Have ``on_move`` called before the next pass."""
        self.moved = True

    # ------------------------------------------------------------ one slot

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

    def _stores(self, layer: int, part: Part) -> tuple[Tensor, ...]:
        """The tensors of a part, each once over all layers."""
        return tuple(getattr(part, kind) for kind in self.shapes[layer].stored)

    def columns(self, layer: int, slot: int, part: Part, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a part's quantized columns and of `count` in full precision, (heads, n, dim).

        Views of the storage where none are quantized, else a copy in the cache's dtype.
        """
        pairs = part.keys[:, :count], part.values[:, :count]
        if self.packed is None or not part.packed:
            return pairs
        packed = self.packed.read(layer, slot, part.heads, part.packed)
        keys, values = (torch.cat([first.to(self.dtype), rest], 1) for first, rest in zip(packed, pairs, strict=True))
        return keys, values

    def clear(self, slot: int) -> None:
        """A text begins in this slot: nothing of it was dropped."""
        if self.dropped is not None:
            self.dropped[slot] = 0
        if self.packed is not None:
            self.packed.count[slot] = 0
        self._least[slot] = self._absent[slot] = 0

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Of the pass that wrote columns `length`, `length + 1`, ... keep these rows, moved together in this order.

        The others lie behind the new length and are overwritten.

        Args:
            slot: the request's slot.
            length: pairs that were there before the pass.
            rows: rows of the pass, counted from its first, ascending.
        """
        if not rows or rows[-1] == len(rows) - 1:  # they are in place
            return
        if self.gather is not None:
            self.gather(slot, length, rows)
            return
        for layer in range(len(self.shapes)):
            for part in self.parts(layer, slot):
                source = torch.tensor([length - part.dropped + row for row in rows], device=part.keys.device)
                for store in self._stores(layer, part):
                    first = length - part.dropped
                    store[:, first : first + len(rows)] = store.index_select(1, source)

    def resumable(self, slot: int, length: int) -> int:
        """Any length: columns behind it are not read."""
        return length

    def roll_back(self, slot: int, length: int) -> None:
        """Nothing to do: columns behind a length are not read."""

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
                for to, kept in zip(self._stores(layer, mine), self._stores(layer, theirs), strict=True):
                    to[:, own] = kept[:, own]
                if self.packed is not None:
                    self.packed.copy(layer, slot, other, theirs.heads, theirs.packed)

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """A copy of a slot's keys and values, quantized ones as they are stored, by layer and head."""
        known = {}
        for layer in range(len(self.shapes)):
            for part in self.parts(layer, slot):
                count = length - part.dropped
                for i, head in enumerate(range(part.heads.start, part.heads.stop)):
                    for kind, store in zip(self.shapes[layer].stored, self._stores(layer, part), strict=True):
                        known[f"{kind}.{layer}.{head}"] = store[i, :count].to("cpu", copy=True)
                    if self.packed is not None:
                        for number, tensor in enumerate(self.packed.get(layer, slot, head)):
                            known[f"packed.{number}.{layer}.{head}"] = tensor.to("cpu", copy=True)
        return known

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Fill an empty slot with what ``snapshot`` gave."""
        names = [[f"{layer}.{head}" for head in range(shape.heads)] for layer, shape in enumerate(self.shapes)]
        if self.dropped is not None:
            for layer, heads in enumerate(names):
                for head, name in enumerate(heads):
                    self.dropped[slot, layer, head] = length - len(known[f"keys.{name}"])
                    if self.packed is not None:  # of the third kind of store a row is a column
                        self.packed.count[slot, layer, head] = len(known[f"packed.2.{name}"])
            self._count_absent(slot)
        self.reserve(slot, length)
        for layer, heads in enumerate(names):
            for head, name in enumerate(heads):
                if self.packed is not None:
                    kinds = range(len(self.packed.stores))
                    self.packed.put(layer, slot, head, [known[f"packed.{kind}.{name}"] for kind in kinds])
                for kind in self.shapes[layer].stored:
                    store, tensor = getattr(self, kind), known[f"{kind}.{name}"]
                    rows, first = store[layer][slot].view(-1, store[layer].shape[-1]), self.starts[layer][head]
                    rows[first : first + len(tensor)] = tensor.to(rows.device)

    def _count_absent(self, slot: int) -> None:
        assert self.dropped is not None
        used = [self.dropped[slot, layer, : shape.heads] for layer, shape in enumerate(self.shapes)]
        self._absent[slot] = int(min(int(some.min()) for some in used))
        if self.packed is not None:
            counts = self.packed.count[slot]
            used = [some - counts[layer, : len(some)] for layer, some in enumerate(used)]
        self._least[slot] = int(min(int(some.min()) for some in used))


def _starts(rooms: Sequence[int]) -> list[int]:
    """The row at which each head begins, and behind them how many there are."""
    return [0, *itertools.accumulate(rooms)]


def _rows(rooms: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a slot's rows, where its heads have these rooms: (heads, room) if they are alike."""
    return (len(rooms), rooms[0]) if len(set(rooms)) == 1 else (sum(rooms),)


def _larger(
    cache: KVStore, store: list[Tensor], kind: str, slots: int, rooms: list[list[int]], keys: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Keys or values in larger tensors; of layers that do not store them those of another layer, or the keys."""
    offloaded, fresh = cache.sizing.offloaded, list[Tensor]()
    allocate: Callable[..., Tensor] = torch.zeros if offloaded is None else offloaded.allocate
    for layer, shape in enumerate(cache.shapes):
        if kind not in shape.stored:
            fresh.append(keys[layer] if shape.source is None else fresh[shape.source])
            continue
        new = allocate((slots, *_rows(rooms[layer]), shape.dims[kind]), dtype=cache.dtype, device=shape.device)
        if store and store[layer].ndim == new.ndim == 4:
            new[: cache.slots, :, : store[layer].shape[2]] = store[layer]
        elif store:
            flat, former = new.view(slots, -1, new.shape[-1]), store[layer].view(cache.slots, -1, new.shape[-1])
            for (begin, end), first in zip(
                itertools.pairwise(cache.starts[layer]), _starts(rooms[layer]), strict=False
            ):
                flat[: cache.slots, first : first + end - begin] = former[:, begin:end]
        fresh.append(new)
    return fresh
