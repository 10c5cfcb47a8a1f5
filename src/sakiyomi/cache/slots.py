"""The slot cache: keys and values of every running request, in one place per request.

Layers of equal (KV heads, key dim, value dim) have tensors of one shape. A slot is one request's place; its rows lie
one after the other, so rolling back is moving a length, and keeping one path of a token tree is one gather. Storage
grows by doubling and is never allocated for a model's maximal context in advance. The cache knows tokens' columns
only; it knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sakiyomi.errors import InputError, MemoryLimitError

FIRST_ROOM = 256
STEP = 64  # columns, where doubling does not fit


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV heads, the size of a key and of a value, and the device, of one attention layer."""

    heads: int
    key_dim: int
    value_dim: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def pair_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in this layer."""
        return self.heads * (self.key_dim + self.value_dim) * itemsize


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
    ) -> None:
        self.shapes = tuple(shapes)
        self.dtype, self.max_slots, self.spare, self.extra = dtype, max_slots, spare, extra
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.room = 0
        self.slots = 0
        self._free = list(range(max_slots - 1, -1, -1))
        self._on_move, self._available = on_move, available
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
        return self.pair_bytes * self.slots * self.room

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
        return self._free.pop()

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
        """Make room for `columns` tokens in a slot, growing all storage by doubling where needed.

        Raises:
            MemoryLimitError: the larger storage does not fit in the memory that is left; nothing has changed then.
        """
        if slot >= self.slots or columns + self.spare > self.room:
            self._grow(*self._storage(slot + 1, columns))
        if self._untold:
            # Before any pass, and again if Ctrl-C came in the middle: half of the pointers would be to freed memory.
            if self._on_move is not None:
                self._on_move(self)
            self._untold = False

    def check(self, requests: int, columns: int) -> None:
        """Refuse what would not fit, without allocating anything.

        Args:
            requests: at once, at most ``max_slots``.
            columns: tokens of the longest.

        Raises:
            MemoryLimitError: with the bytes needed and the length that fits.
        """
        if requests > self.slots or columns + self.spare > self.room:
            self._storage(requests, columns)

    def needs(self, requests: int, columns: int) -> int:
        """Bytes that storage for so many requests of so many tokens will take, without allocating any.

        Raises:
            MemoryLimitError: it would not fit.
        """
        if requests <= self.slots and columns + self.spare <= self.room:
            return self.bytes
        slots, room = self._storage(requests, columns)
        return self.pair_bytes * slots * room

    def _storage(self, requests: int, columns: int) -> tuple[int, int]:
        """Slots and room for so many requests of so many tokens: doubled, or, if that is too much, what is needed."""
        slots, room = max(self.slots, 1), max(self.room, FIRST_ROOM)
        while slots < requests:
            slots = min(slots * 2, self.max_slots + self.extra)
        while room < columns + self.spare:
            room *= 2
        if self._available is None:
            return slots, room
        left = self._available()
        if self.pair_bytes * slots * room <= left:
            return slots, room
        slots, room = max(self.slots, requests), max(self.room, FIRST_ROOM, -(-(columns + self.spare) // STEP) * STEP)
        if (need := self.pair_bytes * slots * room) > left:
            raise MemoryLimitError(
                f"the KV cache needs {need:,} bytes for {slots} requests of {room} tokens, {left:,} are available; "
                f"about {left // (self.pair_bytes * slots)} tokens a request fit: shorten the prompt or lower "
                "max_new_tokens or max_batch"
            )
        return slots, room

    def _grow(self, slots: int, room: int) -> None:
        """Larger storage with the same contents. Interrupted, or out of memory, everything stays as it was."""

        def larger(store: list[Tensor], dims: list[int]) -> list[Tensor]:
            fresh = [
                torch.zeros(slots, shape.heads, room, dim, dtype=self.dtype, device=shape.device)
                for shape, dim in zip(self.shapes, dims, strict=True)
            ]
            for old, new in zip(store, fresh, strict=False):
                new[: self.slots, :, : self.room] = old
            return fresh

        try:
            keys = larger(self.keys, [shape.key_dim for shape in self.shapes])
            values = larger(self.values, [shape.value_dim for shape in self.shapes])
        except torch.OutOfMemoryError as error:  # of what an accelerator has left not every part can be used
            raise MemoryLimitError(
                f"the KV cache needs {self.pair_bytes * slots * room:,} bytes for {slots} requests of {room} tokens, "
                f"and the device did not give them beside the present ones; shorten the prompt, or lower "
                "max_new_tokens or max_batch"
            ) from error
        self.keys, self.values, self.slots, self.room, self._untold = keys, values, slots, room, True
        self.gather = None  # it knows the former tensors

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
        else:
            source = torch.tensor([length + row for row in rows])
            for store in (*self.keys, *self.values):
                source = source.to(store.device)
                store[slot, :, length : length + len(rows)] = store[slot].index_select(1, source)
