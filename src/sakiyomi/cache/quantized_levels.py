"""Keys and values in 4, 3 or 2 bits with levels that are fitted to the model; keys are stored without their rotation.

After KVQuant (arXiv 2401.18079). A position's rotation mixes channels of a key, so keys are turned back before they are
rounded, and turned again when they are read. Each channel of keys has a range, measured on a text when the model is
loaded; each token of values has its own. Within a range the levels are not even: they are found by k-means on that
text, for each layer's keys and values. One number in a hundred is stored apart in 16 bits, and so is the first token,
to which most attention goes. Unlike in the paper, levels are not weighted by gradients, and every 32 tokens have
equally many numbers apart: those that rounding would change most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.cache.quantized import GROUP, LARGEST, Packing, QuantizedKV, Sizes, pack_codes, unpack_codes, value_bytes
from sakiyomi.cache.rotary import Rotation, make_turn
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.kernels.batch import SequenceRows

if TYPE_CHECKING:
    from sakiyomi.cache.host import CacheHost
    from sakiyomi.cache.layout import LayerShape

ASIDE = 0.01  # share of the numbers of 32 tokens
EDGE = ASIDE / 2  # of a channel's numbers that lie beyond its range, on each side
PIECE = 256  # tokens of the text that are read at once; no boundary lies closer
ROUNDS = 40  # of k-means


@dataclass(frozen=True)
class LeveledPacking(Packing):
    """How a cache is quantized: in 4, 3 or 2 bits, see ``Packing``."""

    choices: ClassVar[tuple[int, ...]] = (4, 3, 2)
    with_policies: ClassVar[bool] = False
    fitted: ClassVar[bool] = True
    published: ClassVar[Mapping[str, int]] = {}

    def storage(self, shapes: Sequence[LayerShape], max_slots: int, limits: Sequence[int] | None = None) -> QuantizedKV:
        """Where columns are quantized in this way."""
        return KVQuantStore(shapes, self, max_slots, limits)


def aside_of(dim: int) -> int:
    """Numbers of 32 tokens that lie aside."""
    return max(1, round(ASIDE * GROUP * dim))


def fit_levels(numbers: Tensor, bits: int) -> Tensor:
    """Levels of numbers from 0 to 1, (n), ascending: k-means on a line. Float32 (2^bits)."""
    ordered = numbers.double().clamp(0, 1).sort().values
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    count = 2**bits
    levels = torch.linspace(0, 1, 2 * count + 1, dtype=torch.float64, device=ordered.device)[1::2]
    for _ in range(ROUNDS):
        ends = torch.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2)
        ends = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), len(ordered))])
        many = ends.diff()
        levels = torch.where(many > 0, sums[ends].diff() / many.clamp_min(1), levels)
    return levels.float()


class KVQuantStore(QuantizedKV):
    """The quantized columns of every slot, by layer; a column's place in the text is its number.

    Attributes:
        levels: float32 (layers, 2, 16), of keys and of values, of which the first 2^bits count.
        channels: by layer, float32 (heads, key dim, 2): range and lowest of each channel of keys.
        rotation: of the model's keys.
    """

    packing: LeveledPacking

    def __init__(
        self, shapes: Sequence[LayerShape], packing: Packing, max_slots: int, limits: Sequence[int] | None = None
    ) -> None:
        super().__init__(shapes, packing, max_slots, limits)
        self.levels = torch.zeros(len(self.shapes), 2, 16)
        self.channels = [torch.zeros(shape.heads, shape.key_dim, 2, device=shape.device) for shape in self.shapes]
        self.rotation: Rotation | None = None

    def sizes(self, shape: LayerShape, columns: int) -> Sizes:
        """Key codes, by channel; their numbers aside; value codes, by token; range and lowest of each; numbers aside;
        and key and value of the first token.

        A number aside is its place among those of 32 tokens, channel * 32 + token, and itself as float16.
        """
        groups, first = columns // GROUP, min(columns, 1)
        return [
            ((shape.heads, groups, shape.key_dim, 4 * self.bits), torch.uint8),
            ((shape.heads, groups, aside_of(shape.key_dim), 2), torch.int16),
            ((shape.heads, columns, value_bytes(shape.value_dim, self.bits)), torch.uint8),
            ((shape.heads, columns, 2), torch.float16),
            ((shape.heads, groups, aside_of(shape.value_dim), 2), torch.int16),
            ((shape.heads, first, shape.key_dim + shape.value_dim), torch.float32),
        ]

    def bytes(self, slots: int, room: int) -> int:
        """Bytes of so large a storage, and of what was fitted."""
        beside = self.levels.nbytes + sum(table.nbytes for table in self.channels)
        if self.rotation is not None:
            beside += self.rotation.near.nbytes + max(1, room // GROUP) * self.rotation.far[0].nbytes
        return super().bytes(slots, room) + beside

    def take(self, fresh: list[list[Tensor]], slots: int, room: int) -> None:
        """Store in these tensors from now on."""
        super().take(fresh, slots, room)
        if self.rotation is not None:
            self.rotation.reach(room)

    def uniform(self, layer: int) -> list[Tensor | None]:
        """For the kernels: key codes, value codes and scales; there are no scales of keys in groups."""
        return [self.stores[0][layer], None, self.stores[2][layer], self.stores[3][layer]]

    def leveled(self, layer: int) -> tuple[list[Tensor], list[int]]:
        """For the kernels, see ``Leveled`` in kernels/packed.h; nothing before it is fitted."""
        rotation = self.rotation
        if rotation is None:
            return [], []
        of_layer = [self.stores[kind][layer] for kind in (1, 4, 5)]
        tables = [self.levels[layer], self.channels[layer], *of_layer, rotation.pairs, rotation.near, rotation.far]
        return tables, [of_layer[0].shape[3], of_layer[1].shape[3], len(rotation.pairs)]

    # ------------------------------------------------------------ what is fitted

    def fit(self, model: CacheHost) -> None:
        """Learn ranges and levels from the model's own text, in pieces that are read separately.

        Raises:
            UnsupportedError: its keys cannot be turned back, or lie on several devices.
            InputError: its text is too short.
        """
        asked, cache = f"cache='kvquant-{self.bits}'", model.cache
        if len(model.text) < 2 * GROUP:
            raise InputError(
                f"{asked}: levels are fitted on a text, of {2 * GROUP} tokens or more, and the model has "
                f"{len(model.text)}; give it text="
            )
        if len({shape.device for shape in self.shapes}) > 1:
            raise UnsupportedError(f"{asked}: the model's layers are on several devices; use cache='quant-4'")
        turn = make_turn(model, asked, "use cache='quant-4'")
        self.rotation = Rotation(turn, self.shapes[0].key_dim, model.max_context, self.shapes[0].device)
        self.rotation.reach(max(self.room, PIECE))
        seen: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.shapes]
        # Random tokens beside the text: digits or code give channels larger ranges than stories.
        chance = torch.randint(model.vocab_size, (PIECE,), generator=torch.Generator().manual_seed(0)).tolist()
        pieces = [model.text[begin : begin + PIECE] for begin in range(0, len(model.text), PIECE)]
        for piece in [*(piece[: len(piece) // GROUP * GROUP] for piece in pieces), chance]:
            if not piece:
                continue
            with cache.lent(len(piece)) as slot:
                model.score([SequenceRows(slot, 0, piece, prompt=True)], last=True)
                for layer, (keys, values) in enumerate(seen):
                    parts = cache.parts(layer, slot)
                    read = torch.cat([part.keys[:, : len(piece)] for part in parts]).float()
                    keys.append(self.rotation(read, 0, back=True)[:, 1:])  # the first token is like no other
                    values.append(torch.cat([part.values[:, 1 : len(piece)] for part in parts]).float())
        for layer, (keys, values) in enumerate(seen):
            self.learn(layer, torch.cat(keys, 1), torch.cat(values, 1))
        self.rotation.reach(self.room)
        cache.renew()

    def learn(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """One layer's ranges and levels from keys before their rotation and values, (heads, n, dim)."""
        ends = torch.tensor([EDGE, 1 - EDGE], device=keys.device)
        low, high = torch.quantile(keys, ends, dim=1)  # (heads, dim)
        self.channels[layer] = torch.stack([(high - low).clamp_min(1e-6), low], -1)
        within = (keys - low[:, None]) / self.channels[layer][:, None, :, 0]
        count = 2**self.bits
        self.levels[layer, 0, :count] = fit_levels(within[(within >= 0) & (within <= 1)], self.bits).cpu()
        tiles = _tiles(values[:, : values.shape[1] // GROUP * GROUP])
        aside, scales = _ranges(tiles, 0)
        within = (tiles - scales[..., 1:2, :].float()) / _safe(scales[..., :1, :])
        plain = torch.ones_like(within, dtype=torch.bool).flatten(2).scatter(2, aside, False).view_as(within)
        self.levels[layer, 1, :count] = fit_levels(within[plain], self.bits).cpu()

    # ------------------------------------------------------------ packing

    def encode(self, layer: int, heads: slice, keys: Tensor, values: Tensor, first: int) -> list[Tensor]:
        """Columns as they are stored, see ``QuantizedKV``."""
        assert self.rotation is not None, "packed before it was fitted"
        keys, values = self.rotation(keys.float(), first, back=True), values.float()
        key_levels, value_levels = self._levels(layer, keys.device)
        tiles = _tiles(keys)
        step, low = self.channels[layer][heads, None, :, None].unbind(-1)
        codes = _nearest((tiles - low) / step, key_levels)
        changed = (low + key_levels[codes] * step - tiles).abs()
        of_keys = pack_codes(codes.to(torch.uint8), self.bits), _held_aside(tiles, _largest(changed, first))
        tiles = _tiles(values)
        aside, scales = _ranges(tiles, first)
        codes = _nearest((tiles - scales[..., 1:2, :].float()) / _safe(scales[..., :1, :]), value_levels)
        rows = codes.to(torch.uint8).transpose(2, 3).flatten(1, 2)
        return [
            *of_keys,
            _pack_rows(rows, self.bits),
            scales.transpose(2, 3).flatten(1, 2),
            _held_aside(tiles, aside),
            torch.cat([keys, values], 2)[:, : 1 if first == 0 else 0],
        ]

    def decode(self, layer: int, heads: slice, held: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of a text's first columns, see ``QuantizedKV``."""
        key_codes, key_aside, value_codes, value_scales, value_aside, firsts = held
        shape = self.shapes[layer]
        key_levels, value_levels = self._levels(layer, key_codes.device)
        step, low = self.channels[layer][heads, None, :, None].unbind(-1)
        keys = _untiled(low + key_levels[unpack_codes(key_codes, self.bits).int()] * step, key_aside)
        step, low = value_scales.float()[..., None].unbind(2)
        rows = low + value_levels[_unpack_rows(value_codes, shape.value_dim, self.bits).int()] * step
        values = _untiled(_tiles(rows), value_aside)
        keys[:, : firsts.shape[1]], values[:, : firsts.shape[1]] = firsts.split([shape.key_dim, shape.value_dim], 2)
        assert self.rotation is not None
        return self.rotation(keys, 0), values

    def _levels(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        keys, values = self.levels[layer, :, : 2**self.bits].to(device)
        return keys, values


def _tiles(numbers: Tensor) -> Tensor:
    """(heads, n, dim) as (heads, n / 32, dim, 32)."""
    groups: Tensor = numbers.unflatten(1, (-1, GROUP))
    return groups.transpose(2, 3)


def _untiled(tiles: Tensor, held: Tensor) -> Tensor:
    """The reverse of ``_tiles``, with the numbers aside in their places."""
    places, numbers = held.unbind(-1)
    whole = tiles.flatten(2).scatter(2, places.long() & 0xFFFF, numbers.contiguous().view(torch.float16).float())
    return whole.view_as(tiles).transpose(2, 3).flatten(1, 2)


def _nearest(numbers: Tensor, levels: Tensor) -> Tensor:
    """Of each number the nearest level's code, int64."""
    codes: Tensor = torch.bucketize(numbers.contiguous(), (levels[1:] + levels[:-1]) / 2)
    return codes


def _largest(weights: Tensor, first: int) -> Tensor:
    """Of tiles (heads, groups, dim, 32) the places of the numbers that lie aside, ascending; none of the text's first
    token, which lies aside as a whole.
    """
    if first == 0:
        weights[:, :1, :, 0] = -1
    return weights.flatten(2).topk(aside_of(weights.shape[2]), 2).indices.sort(2).values


def _held_aside(tiles: Tensor, places: Tensor) -> Tensor:
    """As ``KVQuantStore.sizes`` says, int16 (heads, groups, n, 2)."""
    numbers = tiles.flatten(2).gather(2, places).clamp(-LARGEST, LARGEST).half()
    return torch.stack([places.to(torch.int16), numbers.view(torch.int16)], -1)


def _ranges(tiles: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Of tiles of values the places of numbers that lie aside, those furthest from the middle of their token in terms
    of its spread, and range and lowest of what is left of each token, float16 (heads, groups, 2, 32).
    """
    spread = tiles.std(2, correction=0, keepdim=True).clamp_min(1e-6)
    aside = _largest((tiles - tiles.mean(2, keepdim=True)).abs() / spread, first)
    gone = torch.zeros_like(tiles, dtype=torch.bool).flatten(2).scatter(2, aside, True).view_as(tiles)
    low, high = tiles.masked_fill(gone, torch.inf).amin(2), tiles.masked_fill(gone, -torch.inf).amax(2)
    low = low.nan_to_num(posinf=0.0).clamp(-LARGEST, LARGEST).half()
    high = high.nan_to_num(neginf=0.0).clamp(-LARGEST, LARGEST)
    return aside, torch.stack([(high - low.float()).clamp(0, LARGEST).half(), low], 2)


def _safe(steps: Tensor) -> Tensor:
    """Ranges to divide by."""
    return torch.where(steps == 0, 1.0, steps.float())


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Codes of values, (heads, n, dim), by 32 channels; the last have what is left, filled up to a multiple of 8."""
    whole = codes.shape[2] // GROUP * GROUP
    groups = pack_codes(codes[..., :whole].unflatten(2, (-1, GROUP)), bits).flatten(2)
    rest = F.pad(codes[..., whole:], (0, -codes.shape[2] % 8))
    return torch.cat([groups, pack_codes(rest, bits)], 2)


def _unpack_rows(packed: Tensor, dim: int, bits: int) -> Tensor:
    """What ``_pack_rows`` has packed, uint8 (heads, n, dim)."""
    whole = dim // GROUP * 4 * bits
    groups = unpack_codes(packed[..., :whole].unflatten(2, (-1, 4 * bits)), bits).flatten(2)
    return torch.cat([groups, unpack_codes(packed[..., whole:], bits)], 2)[..., :dim]
