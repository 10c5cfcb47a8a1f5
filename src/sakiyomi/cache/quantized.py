"""Keys and values in 8, 4 or 2 bits: how 32 numbers are quantized, and the storage of quantized columns.

After KIVI (arXiv 2402.02750): keys differ more between channels than between tokens, so 32 tokens of one channel share
a scale; of values, 32 channels of one token do. Both are asymmetric, number = low + code * step. A head's quantized
columns come before those in full precision, see ``kv_store.py``. ``quantized_levels.py`` quantizes in another way, in
the same storage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from sakiyomi.cache.host import CacheHost
    from sakiyomi.cache.layout import LayerShape

BITS = (8, 4, 2)
GROUP = 32  # numbers that share a scale
LARGEST = 65504.0  # of float16


Sizes = list[tuple[tuple[int, ...], torch.dtype]]
"""Of one slot's stores in a layer: heads, groups or columns, and what each takes."""


@dataclass(frozen=True)
class Packing:
    """How a cache is quantized.

    Attributes:
        bits: of a number, 8, 4 or 2.
        residual: tokens, the last ones at an eviction boundary, that stay in full precision.
        choices: bits that there are.
        with_policies: whether it goes with a policy that drops pairs.
        fitted: whether it is fitted to a model, on a text.
        published: what the option ``paper`` means: transformers' own default.
    """

    bits: int
    residual: int = 64
    choices: ClassVar[tuple[int, ...]] = BITS
    with_policies: ClassVar[bool] = True
    fitted: ClassVar[bool] = False
    published: ClassVar[Mapping[str, int]] = {"residual": 128}

    def storage(self, shapes: Sequence[LayerShape], max_slots: int, limits: Sequence[int] | None = None) -> QuantizedKV:
        """Where columns are quantized in this way, see ``QuantizedKV``."""
        return QuantizedKV(shapes, self, max_slots, limits)

    def group_bytes(self, shapes: Sequence[LayerShape]) -> int:
        """Bytes of 32 quantized columns of all these layers."""
        return self.storage(shapes, 1).bytes(1, GROUP)

    def columns(self, count: int) -> int:
        """How many of so many columns, the first ones, are quantized at an eviction boundary: whole groups."""
        return max(0, count - self.residual) // GROUP * GROUP


def pack(numbers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers that share a scale, (..., n), n a multiple of 8.

    Step and low are float16: the error of a number is at most half a step, and what the two themselves are rounded by.
    Numbers beyond the range of float16 are cut off there.

    Returns:
        codes, uint8 (..., n * bits / 8): byte j holds codes j, j + n * bits / 8, ..., the first one in its lowest bits;
        scales, float16 (..., 2): step and low.
    """
    most = 2**bits - 1
    wide = numbers.float().clamp(-LARGEST, LARGEST)
    low = wide.amin(-1).half()
    step = ((wide.amax(-1) - low.float()) / most).clamp(0, LARGEST).half()
    steps = step.float()[..., None]
    codes = ((wide - low.float()[..., None]) / torch.where(steps == 0, 1.0, steps)).round_().clamp_(0, most)
    return pack_codes(codes.to(torch.uint8), bits), torch.stack([step, low], -1)


def unpack(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """What ``pack`` has packed, (..., n) float32."""
    step, low = scales.float()[..., None].unbind(-2)
    return low + unpack_codes(codes, bits) * step


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes, uint8 (..., n), n a multiple of 8, in the bytes that ``pack`` says; of 3 bits the lower two come first, as
    2 bits would, and behind them the third, as 1 would.
    """
    if bits == 3:
        return torch.cat([pack_codes(codes & 3, 2), pack_codes(codes >> 2, 1)], -1)
    planes = codes.unflatten(-1, (8 // bits, -1)).unbind(-2)
    packed: Tensor = planes[0]
    for i, plane in enumerate(planes[1:], 1):
        packed = packed | plane << i * bits
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """What ``pack_codes`` has packed, uint8 (..., n)."""
    if bits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], -1)
        return unpack_codes(low, 2) | unpack_codes(high, 1) << 2
    return torch.cat([(packed >> i * bits) & (2**bits - 1) for i in range(8 // bits)], -1)


def pack_keys(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys (heads, n, dim), n a multiple of 32, by channel.

    Returns:
        codes, uint8 (heads, n / 32, dim, 4 * bits), and scales, float16 (heads, n / 32, dim, 2).
    """
    return pack(keys.unflatten(1, (-1, GROUP)).transpose(2, 3), bits)


def unpack_keys(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """(heads, n, dim) float32."""
    return unpack(codes, scales, bits).transpose(2, 3).flatten(1, 2)


def value_bytes(dim: int, bits: int) -> int:
    """Bytes of a value's codes: of whole groups of 32 channels, and of the rest in whole bytes of every plane."""
    return -(-dim // 8) * bits


def pack_values(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Values (heads, n, dim) by token; the last group of channels has what is left.

    Returns:
        codes, uint8 (heads, n, ceil(dim / 8) * bits), and scales, float16 (heads, n, ceil(dim / 32), 2).
    """
    whole = values.shape[2] // GROUP * GROUP
    codes, scales = [], []
    if whole:
        of_groups, steps = pack(values[..., :whole].unflatten(2, (-1, GROUP)), bits)
        codes.append(of_groups.flatten(2))
        scales.append(steps)
    if rest := values.shape[2] - whole:
        # Filled up with a number that is there already, so that the range stays.
        padded = F.pad(values[..., whole:].float(), (0, -rest % 8), mode="replicate")
        of_rest, steps = pack(padded[..., None, :], bits)
        codes.append(of_rest.flatten(2))
        scales.append(steps)
    return torch.cat(codes, 2), torch.cat(scales, 2)


def unpack_values(codes: Tensor, scales: Tensor, dim: int, bits: int) -> Tensor:
    """(heads, n, dim) float32."""
    groups = dim // GROUP
    found = [unpack(codes[..., : 4 * bits * groups].unflatten(2, (groups, 4 * bits)), scales[..., :groups, :], bits)]
    found[0] = found[0].flatten(2)
    if dim % GROUP:
        found.append(unpack(codes[..., 4 * bits * groups :], scales[..., groups, :], bits))
    return torch.cat(found, 2)[..., :dim]


class QuantizedKV:
    """The quantized columns of every slot, by layer.

    Args:
        shapes: of the layers.
        packing: bits, and what is not packed.
        max_slots: slots at most.
        limits: of each layer the columns that a head ever has at once, packed or not; None: any number.

    Attributes:
        count: (max_slots, layers, heads of the largest layer) int32 on the CPU: quantized columns of a slot's heads.
        room: columns that the largest layers have room for.
        stores: of each kind, by layer, what ``sizes`` says, with slots in front; the third has a row for each column.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], packing: Packing, max_slots: int, limits: Sequence[int] | None = None
    ) -> None:
        self.shapes, self.packing, self.bits = tuple(shapes), packing, packing.bits
        self._limits = None if limits is None else [packing.columns(limit) for limit in limits]
        self.count = torch.zeros(max_slots, len(self.shapes), max(shape.heads for shape in shapes), dtype=torch.int32)
        self.room = self.slots = 0
        self.stores: list[list[Tensor]] = [[] for _ in self.sizes(self.shapes[0], 0)]

    def sizes(self, shape: LayerShape, columns: int) -> Sizes:
        """Of the stores that so many columns of a layer take: key codes and scales, value codes and scales, as
        ``pack_keys`` and ``pack_values`` give them.
        """
        keys, values = (shape.heads, columns // GROUP, shape.key_dim), (shape.heads, columns)
        return [
            ((*keys, 4 * self.bits), torch.uint8),
            ((*keys, 2), torch.float16),
            ((*values, value_bytes(shape.value_dim, self.bits)), torch.uint8),
            ((*values, -(-shape.value_dim // GROUP), 2), torch.float16),
        ]

    def fit(self, model: CacheHost) -> None:
        """Fit to a model; uniform codes need nothing of it."""

    def encode(self, layer: int, heads: slice, keys: Tensor, values: Tensor, first: int) -> list[Tensor]:
        """Columns (heads, n, dim) as they are stored, n a multiple of 32.

        Args:
            layer, heads: whose.
            keys, values: as attention reads them.
            first: place of the first one.
        """
        return [*pack_keys(keys, self.bits), *pack_values(values, self.bits)]

    def decode(self, layer: int, heads: slice, held: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, float32 (heads, n, dim), of what ``encode`` gave for a text's first n columns."""
        keys, key_scales, values, value_scales = held
        dim = self.shapes[layer].value_dim
        return unpack_keys(keys, key_scales, self.bits), unpack_values(values, value_scales, dim, self.bits)

    def uniform(self, layer: int) -> list[Tensor | None]:
        """For the kernels: key codes and scales, value codes and scales."""
        return [store[layer] for store in self.stores]

    def leveled(self, layer: int) -> tuple[list[Tensor], list[int]]:
        """For the kernels, where codes stand for levels: what the first ones of ``sk_leveled`` are, and its numbers."""
        return [], []

    def rooms(self, room: int) -> list[int]:
        """Columns of each layer, where the largest have so many."""
        return [room] * len(self.shapes) if self._limits is None else [min(room, limit) for limit in self._limits]

    def bytes(self, slots: int, room: int) -> int:
        """Bytes of so large a storage."""
        each = [self.sizes(*layer) for layer in zip(self.shapes, self.rooms(room), strict=True)]
        return slots * sum(math.prod(size) * dtype.itemsize for sizes in each for size, dtype in sizes)

    def wanted(self, columns: int) -> int:
        """How many quantized columns a text of so many columns may come to."""
        most = self.packing.columns(columns)
        return most if self._limits is None else min(most, max(self._limits))

    def larger(self, slots: int, room: int) -> list[list[Tensor]]:
        """New tensors of this size with what the present ones hold; ``take`` puts them in their place."""
        fresh: list[list[Tensor]] = [[] for _ in self.stores]
        for layer, (shape, columns) in enumerate(zip(self.shapes, self.rooms(room), strict=True)):
            for new, old, (size, dtype) in zip(fresh, self.stores, self.sizes(shape, columns), strict=True):
                store = torch.zeros((slots, *size), dtype=dtype, device=shape.device)
                if old:
                    store[: self.slots, :, : old[layer].shape[2]] = old[layer]
                new.append(store)
        return fresh

    def take(self, fresh: list[list[Tensor]], slots: int, room: int) -> None:
        """Store in these tensors from now on."""
        self.stores, self.slots, self.room = fresh, slots, room

    def _held(self, layer: int, slot: int, heads: slice | int, first: int, last: int) -> list[Tensor]:
        """Views of what heads of a slot hold of columns [first, last), multiples of 32."""
        own = [store[layer][slot, heads] for store in self.stores]
        begins, ends = ([size[1] for size, _ in self.sizes(self.shapes[layer], columns)] for columns in (first, last))
        axis = 1 if isinstance(heads, slice) else 0
        return [store.narrow(axis, begin, end - begin) for store, begin, end in zip(own, begins, ends, strict=True)]

    def read(self, layer: int, slot: int, heads: slice, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` columns of a slot's heads, keys and values, (heads, count, dim) float32."""
        return self.decode(layer, heads, self._held(layer, slot, heads, 0, count))

    def get(self, layer: int, slot: int, head: int) -> list[Tensor]:
        """What one head of a slot holds, of each kind of store."""
        return self._held(layer, slot, head, 0, int(self.count[slot, layer, head]))

    def put(self, layer: int, slot: int, head: int, held: Sequence[Tensor]) -> None:
        """Have a head of a slot, of which the count is right, hold this, as ``get`` gave it."""
        for store, tensor in zip(self.get(layer, slot, head), held, strict=True):
            store.copy_(tensor)

    def copy(self, layer: int, slot: int, other: int, heads: slice, count: int) -> None:
        """Have heads of a slot, of which the count is right, hold the first `count` columns of another slot's."""
        both = (self._held(layer, which, heads, 0, count) for which in (slot, other))
        for mine, theirs in zip(*both, strict=True):
            mine.copy_(theirs)

    def append(self, layer: int, slot: int, heads: slice, keys: Tensor, values: Tensor) -> None:
        """Pack these columns behind those that are there, (heads, n, dim), n a multiple of 32."""
        first = int(self.count[slot, layer, heads.start])
        last = first + keys.shape[1]
        held = self._held(layer, slot, heads, first, last)
        for store, new in zip(held, self.encode(layer, heads, keys, values, first), strict=True):
            store.copy_(new)
        self.count[slot, layer, heads] = last

    def rewrite(self, layer: int, slot: int, heads: slice, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Hold other columns from now on.

        Quantized values move as they are, and so do keys whose whole group moves. Keys in other company than before are
        quantized anew, which adds up to half a step of the new group to their error: where a ninth of all pairs goes at
        every boundary, keys of normal numbers in 4 bits are 0.079 of their spread off at first, 0.10 after one
        boundary, 0.13 after 4, 0.17 after 16 and after 96.

        Args:
            layer, slot, heads: whose.
            columns: (heads, n) int64, which of the columns so far, those in full precision counted behind; n a multiple
                of 32.
            keys, values: (heads, n, dim) float32 of these columns.
        """
        before, count = int(self.count[slot, layer, heads.start]), columns.shape[1]
        self.count[slot, layer, heads] = count
        if not count:
            return
        codes, scales, value_codes, value_scales = (store[layer][slot, heads] for store in self.stores)
        columns = columns.to(codes.device)
        packed = zip((codes, scales), pack_keys(keys, self.bits), strict=True)
        of_values = zip((value_codes, value_scales), pack_values(values, self.bits), strict=True)
        groups = columns.unflatten(1, (-1, GROUP))
        first = groups[..., 0]
        whole = (groups == first[..., None] + torch.arange(GROUP, device=columns.device)).all(2)
        whole &= (first % GROUP == 0) & (first < before)
        for moved, index, stores in ((whole, first // GROUP, packed), (columns < before, columns, of_values)):
            for store, new in stores:
                tail = (1,) * (store.ndim - 2)
                index_ = index.clamp_max(max(store.shape[1] - 1, 0)).view(*index.shape, *tail)
                old = store.gather(1, index_.expand(-1, -1, *store.shape[2:]))
                store[:, : new.shape[1]] = torch.where(moved.view(*moved.shape, *tail), old, new)
