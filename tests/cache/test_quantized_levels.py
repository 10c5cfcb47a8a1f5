"""Keys and values at levels that are fitted: the levels, what lies aside, rotation, storage, and what it takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.quantized import Packing, pack_codes, unpack_codes
from sakiyomi.cache.quantized_levels import KVQuantStore, LeveledPacking, aside_of, fit_levels
from sakiyomi.cache.rotary import Rotation
from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.errors import UnsupportedError
from turning import fit, turning

BITS = LeveledPacking.choices
SHAPE = LayerShape(2, 20, 24)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def stored(bits: int, *, neighbours: bool = False, residual: int = 0) -> KVQuantStore:
    """Storage of one layer, fitted to normal numbers."""
    packed = KVQuantStore([SHAPE], LeveledPacking(bits, residual), 2)
    fit(packed, random(2, 512, 20), random(2, 512, 24), neighbours=neighbours)
    return packed


def held(packed: KVQuantStore, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of these columns in a slot."""
    packed.take(packed.larger(1, keys.shape[1]), 1, keys.shape[1])
    packed.append(0, 0, slice(0, 2), keys, values)
    return packed.read(0, 0, slice(0, 2), keys.shape[1])


# ---------------------------------------------------------------- codes, levels, angles


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("width", [8, 24, 32])
def test_codes(bits: int, width: int) -> None:
    codes = torch.randint(2**bits, (5, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, width * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)


def test_levels_lie_where_the_numbers_are() -> None:
    centres = torch.tensor([0.02, 0.45, 0.55, 0.93])
    numbers = (centres + 0.01 * random(500, 4)).flatten()
    assert torch.allclose(fit_levels(numbers, 2), centres, atol=2e-3)
    normal = random(5000) * 0.15 + 0.5
    errors = []
    for levels in (fit_levels(normal, 3), torch.linspace(0, 1, 8)):
        errors.append((normal[:, None] - levels).abs().amin(1).square().mean())
    assert errors[0] < 0.6 * errors[1]
    assert fit_levels(torch.tensor([0.5]), 2).isfinite().all()


@pytest.mark.parametrize("neighbours", [False, True])
def test_rotation_is_the_model_s_own(neighbours: bool) -> None:
    turn = turning(20, neighbours=neighbours)
    rotation = Rotation(turn, 20, 1 << 20, torch.device("cpu"))
    rotation.reach(9600)
    keys = random(2, 64, 20)
    for first in (0, 32, 9536):
        there = rotation(keys, first)
        assert torch.allclose(there, turn(0, keys, torch.arange(first, first + 64).expand(2, -1)), atol=2e-3)
        assert torch.allclose(rotation(there, first, back=True), keys, atol=1e-5)
    assert rotation.near.numel() + rotation.far.numel() == (32 + 300) * len(rotation.pairs) * 2


def test_what_is_no_rotation_is_refused() -> None:
    def turn(layer: int, keys: Tensor, by: Tensor) -> Tensor:
        return keys + by[..., None]

    with pytest.raises(UnsupportedError, match=r"not rotated in pairs.*quant-4"):
        Rotation(turn, 8, 100, torch.device("cpu"))


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_every_number_is_at_its_nearest_level_or_aside(bits: int, neighbours: bool) -> None:
    """Number by number, keys before their rotation; those aside are the ones that rounding would change most."""
    packed = stored(bits, neighbours=neighbours)
    keys, values = random(2, 96, 20, seed=3), random(2, 96, 24, seed=4)
    keys[0, 40, 7], values[1, 70, 3] = 50.0, -30.0
    got_keys, got_values = held(packed, keys, values)
    turn, places = turning(20, neighbours=neighbours), torch.arange(96).expand(2, -1)
    before, after = turn(0, keys, -places), turn(0, got_keys, -places)
    assert torch.allclose(after[:, 0], before[:, 0], atol=1e-6) and torch.equal(got_values[:, 0], values[:, 0])
    levels = packed.levels[0, 0, : 2**bits]
    for head in range(2):
        step, low = packed.channels[0][head].unbind(-1)
        nearest = (before[head, :, :, None] - low[:, None] - levels * step[:, None]).abs().amin(2)
        error = (after[head] - before[head]).abs()
        for group in range(3):
            at = slice(max(1, 32 * group), 32 * group + 32)
            exact = (error[at] < 2e-3 * before[head, at].abs() + 1e-4) & (nearest[at] > 5e-3)
            count = aside_of(20)
            assert int(exact.sum()) <= count
            worst = nearest[at].flatten().topk(count)
            assert (error[at].flatten()[worst.indices] < 3e-2).all()
            rest = torch.ones(nearest[at].numel(), dtype=torch.bool).scatter(0, worst.indices, False)
            assert torch.allclose(error[at].flatten()[rest], nearest[at].flatten()[rest], atol=1e-3)
    assert (got_values - values).abs().amax() < 4.5 / (2**bits - 1)
    assert abs(float(got_values[1, 70, 3]) + 30) < 0.02


@pytest.mark.parametrize("bits", BITS)
def test_less_is_lost_than_with_even_steps(bits: int) -> None:
    """Of keys whose channels differ before their rotation, against even steps in a range for each rotated channel."""
    sizes = torch.linspace(0.1, 4, 20)
    keys, values = random(2, 1024, 20) * sizes, random(2, 1024, 24)
    packed = KVQuantStore([SHAPE], LeveledPacking(bits), 1)
    fit(packed, keys[:, :512], values)
    turn = turning(20)
    rotated = turn(0, keys[:, 512:], torch.arange(512).expand(2, -1))
    errors = []
    for found in (held(packed, rotated, values[:, 512:])[0], even(rotated, bits)):
        errors.append((found - rotated).square().mean())
    assert errors[0] < 0.75 * errors[1]


def even(keys: Tensor, bits: int) -> Tensor:
    """Keys rounded in even steps by channel, over all tokens."""
    low, high = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return low + ((keys - low) / step).round() * step


# ---------------------------------------------------------------- storage


@pytest.mark.parametrize("bits", BITS)
def test_packing_at_borders_is_packing_at_once(bits: int) -> None:
    keys, values = random(2, 400, 20, seed=1), random(2, 400, 24, seed=2)
    packed = stored(bits, residual=20)
    cache = SlotCache([SHAPE], dtype=torch.float32, max_slots=2, limits=[[256, 256]], packed=packed)
    first = 0
    for border in (19, 53, 84, 300, 400):
        cache.reserve(1, border)
        (part,) = cache.parts(0, 1)
        own = slice(first - part.dropped, border - part.dropped)
        part.keys[:, own], part.values[:, own] = keys[:, first:border], values[:, first:border]
        cache.pack(1, border)
        first = border
    (part,) = cache.parts(0, 1)
    assert part.packed == 352
    found = cache.columns(0, 1, part, 48)
    for got, all_at_once, rest in zip(
        found, held(stored(bits), keys[:, :352], values[:, :352]), (keys, values), strict=True
    ):
        assert torch.equal(got[:, :352], all_at_once)
        assert torch.equal(got[:, 352:], rest[:, 352:])


@pytest.mark.parametrize("bits", BITS)
def test_bytes(bits: int) -> None:
    """Heads of 64: bits of a number, 32 of one in a hundred, and 32 of a value's range; what was fitted counts too."""
    shape = LayerShape(4, 64, 64)
    packed = KVQuantStore([shape] * 2, LeveledPacking(bits), 1)
    fit(packed, random(4, 64, 64), random(4, 64, 64))
    packed.take(packed.larger(1, 8192), 1, 8192)
    of_text = sum(store.nbytes for stores in packed.stores for store in stores)
    numbers, aside = 2 * 4 * 8192 * 128, round(0.01 * 32 * 64)
    assert of_text == numbers * bits // 8 + 2 * 4 * 256 * 2 * aside * 4 + 2 * 4 * 8192 * 4 + 2 * 4 * 128 * 4
    rotation = packed.rotation
    assert rotation is not None
    tables = [packed.levels, *packed.channels, rotation.near, rotation.far]
    assert packed.bytes(1, 8192) == of_text + sum(table.nbytes for table in tables)
    assert of_text * 8 / numbers < bits + 0.6


def test_it_is_another_packing() -> None:
    assert LeveledPacking(4) != Packing(4) and LeveledPacking(4) == LeveledPacking(4, 64)
