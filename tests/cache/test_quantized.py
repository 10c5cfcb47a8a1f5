"""Packed keys and values: what rounding does to them, what they take, and attention that reads them as they are.

Those with levels fitted to a model are in test_leveled_pairs.py, but for attention, which is here for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends import backend_on
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.policies import CacheSpec, read_cache
from sakiyomi.cache.quantized import (
    BITS,
    GROUP,
    Packing,
    QuantizedKV,
    pack,
    pack_keys,
    pack_values,
    unpack,
    unpack_keys,
    unpack_values,
)
from sakiyomi.cache.quantized_levels import KVQuantStore, LeveledPacking
from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.errors import InputError, MemoryLimitError
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.native import PackedWeights
from turning import fit

native_only = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
DTYPES = (torch.float32, torch.bfloat16)
HOW = [pytest.param("native", marks=native_only), "dense", "by row"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    width=st.sampled_from([8, 16, 24, 32]),
    scale=st.sampled_from([1e-4, 1.0, 30.0, 1000.0]),
    shift=st.sampled_from([0.0, -3.0, 40.0]),
    seed=st.integers(0, 1000),
)
def test_error_is_half_a_step(bits: int, width: int, scale: float, shift: float, seed: int) -> None:
    """And what the step, 2^-11 of itself for each of its codes, and the low are rounded by; 2^-25 below 2^-14."""
    numbers = random(7, width, seed=seed) * scale + shift
    codes, scales = pack(numbers, bits)
    assert (codes.shape, codes.dtype) == ((7, width * bits // 8), torch.uint8)
    low, high = numbers.amin(1, keepdim=True), numbers.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    rounding = 2**-11 * (high - low) + 2**-11 * low.abs() * 2 + (2**bits + 1) * 2**-25
    error = (unpack(codes, scales, bits) - numbers).abs()
    assert (error <= step / 2 + rounding + 1e-6 * numbers.abs()).all()


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1000), shift=st.sampled_from([0.0, 0.5]))
def test_what_is_packed_packs_to_itself(bits: int, seed: int, shift: float) -> None:
    """Whatever is unpacked for a while and packed in the same company is the same again."""
    once = pack(random(40, GROUP, seed=seed) + shift, bits)
    again = pack(unpack(*once, bits), bits)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_numbers_beyond_float16_are_cut_off_not_lost() -> None:
    numbers = torch.tensor([[1e30, -1e30, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    assert unpack(*pack(numbers, 8), 8).isfinite().all()
    constant = torch.full((1, 8), 0.25)
    assert torch.equal(unpack(*pack(constant, 2), 2), constant)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 8, 20, 32, 40, 64, 80, 96, 128])
def test_axes(bits: int, dim: int) -> None:
    """A channel far from the others costs keys nothing, and a token far from the others costs values nothing."""
    pairs = random(2, 3 * GROUP, dim)
    loud_channel, loud_token = pairs.clone(), pairs.clone()
    loud_channel[:, :, 0] *= 1000
    loud_token[:, 0] *= 1000
    keys = unpack_keys(*pack_keys(loud_channel, bits), bits)
    values = unpack_values(*pack_values(loud_token, bits), dim, bits)
    assert keys.shape == values.shape == pairs.shape
    bound = 9 / (2**bits - 1) / 2 * 1.01  # normal numbers lie within 9 of each other here
    assert ((keys - pairs)[:, :, 1:].abs() <= bound).all()
    assert ((values - pairs)[:, 1:].abs() <= bound).all()


@pytest.mark.parametrize("bits", BITS)
def test_bytes(bits: int) -> None:
    """Heads of 64: a number takes its bits and, of step and low in 16 bits each, its share of 1 / 32."""
    shape = LayerShape(4, 64, 64)
    cache = SlotCache(
        [shape] * 2,
        dtype=torch.bfloat16,
        max_slots=1,
        limits=[[607] * 4] * 2,
        packed=QuantizedKV([shape] * 2, Packing(bits), 1),
    )
    packed = cache.packed
    assert packed is not None
    cache.reserve(0, 600)
    packed.take(packed.larger(1, 8192), 1, 8192)
    stored = sum(store.nbytes for stores in packed.stores for store in stores)
    beside = 2 * 4 * 607 * 128 * 2
    assert stored == cache.bytes - beside == 2 * 4 * 8192 * 128 * (bits + 1) // 8
    assert sum(store.nbytes for store in (*cache.keys, *cache.values)) == beside


# ---------------------------------------------------------------- storage


def cache_of(
    shape: LayerShape, packing: Packing, *, room: int = 256, dtype: torch.dtype = torch.float32, places: int = 3
) -> SlotCache:
    packed = QuantizedKV([shape], packing, places)
    return SlotCache([shape], dtype=dtype, max_slots=places, limits=[[room] * shape.heads], packed=packed)


def all_columns(cache: SlotCache, slot: int, length: int) -> tuple[Tensor, Tensor]:
    pairs = [cache.columns(0, slot, part, length - part.dropped) for part in cache.parts(0, slot)]
    return torch.cat([keys for keys, _ in pairs]), torch.cat([values for _, values in pairs])


def fill(cache: SlotCache, slot: int, first: int, last: int, keys: Tensor, values: Tensor) -> None:
    """Write the pairs of tokens where a pass would."""
    cache.reserve(slot, last)
    for part in cache.parts(0, slot):
        own = slice(first - part.dropped, last - part.dropped)
        part.keys[:, own], part.values[:, own] = keys[part.heads, first:last], values[part.heads, first:last]


@pytest.mark.parametrize("bits", BITS)
def test_packing_at_borders_is_packing_at_once(bits: int) -> None:
    """Groups lie at places of the text, so it does not matter at which border a group was packed; growth keeps all."""
    shape, packing = LayerShape(2, 24, 40), Packing(bits, 20)
    keys, values = random(2, 700, 24), random(2, 700, 40, seed=1)
    cache, at_once = cache_of(shape, packing), cache_of(shape, packing, room=1000)
    at_once.reserve(0, 700)
    first = 0
    for border in (1, 19, 53, 83, 84, 85, 300, 400, 555, 700):
        fill(cache, 1, first, border, keys, values)
        cache.pack(1, border)
        assert int(cache.packed.count[1, 0, 0]) == max(0, border - 20) // 32 * 32  # type: ignore[union-attr]
        first = border
    fill(at_once, 0, 0, 700, keys, values)
    at_once.pack(0, 700)
    for a, b in zip(all_columns(cache, 1, 700), all_columns(at_once, 0, 700), strict=True):
        assert torch.equal(a, b)
    count = 672
    found = all_columns(cache, 1, 700)
    assert torch.equal(found[0][:, :count], unpack_keys(*pack_keys(keys[:, :count], bits), bits))
    assert torch.equal(found[1][:, :count], unpack_values(*pack_values(values[:, :count], bits), 40, bits))
    assert torch.equal(found[0][:, count:], keys[:, count:])
    assert cache.least(1) == 0
    cache.clear(1)
    assert not cache.packed.count.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10_000), keep=st.integers(40, 250))
def test_dropping_from_packed_columns(bits: int, seed: int, keep: int) -> None:
    """Values that were packed stay what they were to the bit, keys whose group moves as a whole do, and all others lie
    within a step of what they were.
    """
    shape, packing = LayerShape(2, 16, 40), Packing(bits, 32)
    keys, values = random(2, 256, 16, seed=seed), random(2, 256, 40, seed=seed + 1)
    cache = cache_of(shape, packing)
    fill(cache, 0, 0, 200, keys, values)
    cache.pack(0, 200)
    fill(cache, 0, 200, 256, keys, values)
    before = all_columns(cache, 0, 256)
    generator = torch.Generator().manual_seed(seed)
    kept = [torch.randperm(256, generator=generator)[:keep].sort().values for _ in range(2)]
    kept[1] = torch.arange(keep)  # whole groups
    cache.drop(0, 256, [kept])
    after = all_columns(cache, 0, 256)
    packed = packing.columns(keep)
    assert int(cache.packed.count[0, 0, 0]) == packed  # type: ignore[union-attr]
    assert cache.least(0) == 256 - keep
    assert torch.equal(cache.dropped[0, 0], torch.tensor([256 - keep + packed] * 2, dtype=torch.int32))  # type: ignore[index]
    for head, columns in enumerate(kept):
        were = columns < 160  # packed before
        same = (after[1][head] == before[1][head, columns]).all(1)
        assert same[were].all() and same[packed:].all()
        wide = (before[0][head, columns][:packed].unflatten(0, (-1, GROUP))) if packed else torch.zeros(0, GROUP, 16)
        steps = ((wide.amax(1) - wide.amin(1)) / (2**bits - 1)).repeat_interleave(GROUP, 0)
        gaps = (after[0][head] - before[0][head, columns]).abs()
        assert (gaps[:packed] <= steps / 2 * 1.01 + 4e-3).all()
        assert not gaps[packed:].any()
    whole = min(packed, 160)
    assert torch.equal(after[0][1, :whole], before[0][1, :whole])


def test_memory_is_refused_with_its_numbers() -> None:
    shape = LayerShape(2, 64, 64)
    packed = QuantizedKV([shape], Packing(4), 1)
    cache = SlotCache(
        [shape], dtype=torch.float32, max_slots=1, limits=[[600] * 2], packed=packed, available=lambda: 1 << 20
    )
    cache.needs(1, 2000)
    with pytest.raises(MemoryLimitError, match=r"1,048,576 are available; about 6553 tokens"):
        cache.needs(1, 20_000)
    assert cache.bytes == 0


def test_more_than_there_will_be_room_for_is_refused() -> None:
    """The kernels write where they are told to."""
    cache = cache_of(LayerShape(1, 8, 8), Packing(4), room=300)
    with pytest.raises(InputError, match=r"301 tokens.*holds 300 of them.*cache='full'"):
        cache.reserve(0, 301)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class Case:
    """One layer in one pass; every head of a slot may have dropped and packed another number."""

    shape: LayerShape
    packing: Packing
    group: int
    segments: tuple[SequenceRows, ...]
    scaling: float
    softcap: float
    window: int
    seed: int
    counts: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # by slot and head: packed, dropped

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        heads, rows = self.shape.heads, sum(len(segment.tokens) for segment in self.segments)
        return (
            random(1, heads * self.group, rows, self.shape.key_dim, seed=self.seed).to(dtype),
            random(1, heads, rows, self.shape.key_dim, seed=self.seed + 1).to(dtype),
            random(1, heads, rows, self.shape.value_dim, seed=self.seed + 2).to(dtype),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = st.sampled_from([8, 13, 16, 32, 40, 64, 72, 80, 128])
    packing = draw(st.sampled_from([kind(bits, 0) for kind in (Packing, LeveledPacking) for bits in kind.choices]))
    heads = draw(st.integers(1, 3))
    segments, counts = [], {}
    even = draw(st.booleans())
    for slot in draw(st.permutations(range(3)))[: draw(st.integers(1, 3))]:
        count = draw(st.integers(1, 7))
        parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, count)))
        prompt = draw(st.booleans())
        length = draw(st.integers(0, 200))
        segments.append(SequenceRows(slot, length, [0] * count, None if prompt else parents, prompt=prompt))
        for head in range(heads):
            dropped = draw(st.integers(0, length)) if packing.with_policies else 0
            packed = draw(st.integers(0, (length - dropped) // 32)) * 32
            counts[slot, head] = counts[slot, 0] if even and head else (packed, dropped)
    return Case(
        LayerShape(heads, draw(dims), draw(dims)),
        packing,
        draw(st.integers(1, 4)),
        tuple(segments),
        draw(st.sampled_from([1.0, 0.3])),
        draw(st.sampled_from([0.0, 0.0, 1.5])),
        draw(st.one_of(st.just(0), st.integers(1, 100))),
        draw(st.integers(0, 1000)),
        counts,
    )


def storage(shape: LayerShape, packing: Packing) -> QuantizedKV:
    """Of one layer, fitted to noise."""
    packed = packing.storage([shape], 3)
    if packing.fitted:
        assert isinstance(packed, KVQuantStore)
        fit(packed, random(shape.heads, 256, shape.key_dim), random(shape.heads, 256, shape.value_dim))
    return packed


def filled(case: Case, dtype: torch.dtype) -> SlotCache:
    """A cache full of noise, with so many columns packed and dropped."""
    packed = storage(case.shape, case.packing)
    heads = case.shape.heads
    cache = SlotCache(
        [case.shape],
        dtype=dtype,
        max_slots=3,
        limits=[[300] * heads],
        packed=packed,
    )
    cache.reserve(2, 256)
    for store, seed in ((cache.keys, 3), (cache.values, 4)):
        store[0].copy_(random(*store[0].shape, seed=case.seed + seed))
    for slot in range(3):
        keys = random(heads, 256, case.shape.key_dim, seed=case.seed + slot + 5)
        packed.append(0, slot, slice(0, heads), keys, random(heads, 256, case.shape.value_dim, seed=case.seed + slot))
    packed.count.zero_()
    assert cache.dropped is not None
    for (slot, head), (count, dropped) in case.counts.items():
        packed.count[slot, 0, head] = count
        cache.dropped[slot, 0, head] = count + dropped
    return cache


def run(case: Case, dtype: torch.dtype, how: str) -> Tensor:
    """The operator's output (rows, heads, value dim)."""
    backend = backend_on(filled(case, dtype), native=how == "native", by_row=how == "by row")
    q, k, v = case.inputs(dtype)
    backend.begin(BatchPlan(case.segments), q.shape[2])
    return backend.attend(q, k, v, 0, case.scaling, case.softcap, case.window)[0]


def oracle(case: Case, dtype: torch.dtype) -> Tensor:
    """Each row and head alone, in double precision, over all packed columns, those behind them, and its own path."""
    cache = filled(case, dtype)
    q, k, v = (x.double() for x in case.inputs(dtype))
    out = torch.zeros(q.shape[2], q.shape[1], case.shape.value_dim, dtype=torch.float64)
    row = 0
    for segment in case.segments:
        count = len(segment.tokens)
        parents = segment.parents if segment.parents is not None else tuple(range(-1, count - 1))
        for head in range(case.shape.heads):
            packed, dropped = case.counts[segment.slot, head]
            assert cache.packed is not None
            old = cache.packed.read(0, segment.slot, slice(head, head + 1), packed)
            left = segment.length - packed - dropped
            stores = cache.keys[0][segment.slot, head, :left], cache.values[0][segment.slot, head, :left]
            for i in range(count):
                path, node = [], i
                while node >= 0:
                    path.insert(0, row + node)
                    node = parents[node]
                keys = torch.cat([old[0][0].double(), stores[0].double(), k[0, head, path]])
                values = torch.cat([old[1][0].double(), stores[1].double(), v[0, head, path]])
                if case.window:
                    keys, values = keys[-case.window :], values[-case.window :]
                for own in range(head * case.group, (head + 1) * case.group):
                    scores = keys @ q[0, own, row + i] * case.scaling
                    if case.softcap:
                        scores = case.softcap * (scores / case.softcap).tanh()
                    out[row + i, own] = scores.softmax(-1) @ values
        row += count
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_attention_reads_packed_columns(how: str, dtype: torch.dtype, case: Case) -> None:
    """Any number packed and dropped by each head, trees and chunks, groups, head sizes, windows and soft caps."""
    got, exact = run(case, dtype, how), oracle(case, dtype)
    # In bf16 keys of up to 4.5 and weights are rounded by 2^-9 of them: scores by up to a few hundredths.
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= tolerance


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [pytest.param("native", marks=native_only), "by row"])
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_a_row_does_not_depend_on_its_company(how: str, dtype: torch.dtype, case: Case) -> None:
    """The first row of a tree is bit-equal alone: exact=True rests on it."""
    together, row = run(case, dtype, how), 0
    q, k, v = case.inputs(dtype)
    for segment in case.segments:
        if not segment.prompt:
            backend = backend_on(filled(case, dtype), native=how == "native", by_row=True)
            backend.begin(BatchPlan([SequenceRows(segment.slot, segment.length, [0])]), 1)
            own = (x[:, :, row : row + 1] for x in (q, k, v))
            alone = backend.attend(*own, 0, case.scaling, case.softcap, case.window)[0, 0]
            assert torch.equal(alone, together[row])
        row += len(segment.tokens)


# ---------------------------------------------------------------- specs


def test_specs() -> None:
    assert read_cache("full") == CacheSpec()
    assert read_cache("quant-8") == CacheSpec(packing=Packing(8, 64))
    assert read_cache("quant-2[residual=96]") == CacheSpec(packing=Packing(2, 96))
    assert read_cache("kvquant-3[residual=96]") == CacheSpec(packing=LeveledPacking(3, 96))
    assert read_cache("kvquant-4") != read_cache("quant-4")
    for spec in ("h2o[sinks=2]+quant-4", "quant-4+h2o[sinks=2]"):
        policy, packing, *_ = read_cache(spec)
        assert policy is not None and policy.name == "h2o" and policy.sinks == 2
        assert packing == Packing(4)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("quant-3", r"'3' bits; expected quant-8, quant-4 or quant-2"),
        ("quant-", r"'' bits"),
        ("kvquant-8", r"'8' bits; expected kvquant-4, kvquant-3 or kvquant-2"),
        ("kvquant-4[bits=2]", r"kvquant-4 has no option 'bits'; it has residual"),
        ("kvquant-4+quant-4", r"at most one policy"),
        ("quant-4+quant-8", r"at most one policy .* one of quant-8"),
        ("h2o+quant-4+snapkv", r"at most one policy"),
        ("full+quant-4", r"at most one policy"),
        ("h2o+snapkv", r"at most one policy.* as h2o\+quant-4"),
        ("quant-4[bits=2]", r"quant-4 has no option 'bits'; it has residual"),
        ("quant-4[residual=-1]", r"expected a whole number of 0 or more"),
        ("quant", r"quant-8, quant-4"),
    ],
)
def test_specs_that_say_nothing(spec: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_cache(spec)
