"""The operators one by one: the compiled linear layer and both attentions against slow clear versions.

A failure here is the first cause of failures elsewhere: look at it before the golden tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends import backend_on, begin
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels import build
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.native import PackedWeights, can_pack, pack_weight

native_only = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


# ---------------------------------------------------------------- linear


@native_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("inner", "out"),
    [(2, 1), (2, 16), (6, 5), (16, 17), (30, 63), (32, 64), (34, 65), (64, 100), (130, 129), (256, 33), (192, 96)],
)
def test_linear_is_linear(inner: int, out: int, bias: bool, dtype: torch.dtype) -> None:
    """Output channels come in blocks of 16 and 64, rows in blocks of 6: every remainder has code of its own."""
    model = PackedWeights.create()
    assert model is not None
    weight, shift = random(out, inner, dtype=dtype), random(out, dtype=dtype, seed=9) if bias else None
    layer = model.add_linear(weight, shift)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 33):
        begin(model, rows)
        x = random(1, rows, inner, dtype=dtype, seed=1)
        got = layer(x)
        assert (got.shape, got.dtype) == ((1, rows, out), dtype)
        exact = F.linear(x.double(), weight.double(), None if shift is None else shift.double())
        # fp32: sums of `inner` products in another order; bf16: the result's own rounding, 2^-8 of it, comes on top.
        size = x.double().abs() @ weight.double().abs().T + (0 if shift is None else shift.double().abs())
        allowed = size * 1e-6 + (0 if dtype == torch.float32 else exact.abs() * 2**-8)
        assert ((got.double() - exact).abs() <= allowed).all()


@native_only
@pytest.mark.parametrize("bits", [16, 8])
def test_the_matrix_unit_changes_nothing_but_time(bits: int) -> None:
    """The same whole sums with and without it; in bf16 sums of the same products, in another order."""
    library, model = build.native(), PackedWeights.create()
    assert library is not None and model is not None
    if not library.sk_tiles(1):
        pytest.skip("this processor has no matrix unit (AMX), or the system does not grant it")
    weight = random(75, 320, dtype=torch.bfloat16)
    layer = model.add_linear(weight, random(75, dtype=torch.bfloat16), bits=bits)
    x = random(1, 40, 320, dtype=torch.bfloat16)
    begin(model, 40)
    try:
        found = [layer(x) for wanted in (0, 1) if library.sk_tiles(wanted)]
    finally:
        library.sk_tiles(1)
    size = (x.double().abs() @ weight.double().abs().T).amax()
    allowed = 0.0 if bits == 8 else 1e-6 * float(size)
    torch.testing.assert_close(found[1], found[0], rtol=0.0 if bits == 8 else 2**-7, atol=allowed)


@native_only
def test_linear_takes_any_layout() -> None:
    """Rows may come with strides, with more dimensions in front, and in another number than the pass has: experts get
    the rows that were routed to them, in any order, and some models apply a layer to each head.
    """
    model = PackedWeights.create()
    assert model is not None
    weight = random(20, 8)
    layer = model.add_linear(weight, None)
    for rows, filler in ((1, 0), (3, 1), (5, 3)):
        begin(model, rows, filler)
        for x in (random(8, 5).T, random(3, 4, 8), random(5, 16)[:, ::2], random(8), random(9, 8)):
            torch.testing.assert_close(layer(x), F.linear(x, weight), rtol=1e-5, atol=1e-5)


@native_only
def test_linear_refuses_what_does_not_fit() -> None:
    """A wrong width or dtype would read foreign memory."""
    model = PackedWeights.create()
    assert model is not None
    layer = model.add_linear(random(4, 6), None)
    begin(model, 1)
    for x in (random(1, 8), random(1, 6, dtype=torch.bfloat16), random(1, 6).double()):
        with pytest.raises(RuntimeError, match="sakiyomi_cpu::linear"):
            layer(x)
    assert not can_pack((4, 7), torch.bfloat16)
    assert not can_pack((4, 8), torch.float16)


@native_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [70, 192])
def test_linear_computes_each_row_alone(inner: int, dtype: torch.dtype) -> None:
    """Bit-equal whatever the other rows are, how many there are, and where it stands: exact=True rests on it.

    Inputs in 64s may go through a matrix unit, in groups of 16 rows.
    """
    model = PackedWeights.create()
    assert model is not None
    layer = model.add_linear(random(150, inner, dtype=dtype), random(150, dtype=dtype))
    x = random(1, 64, inner, dtype=dtype)
    begin(model, 1)
    alone = torch.cat([layer(x[:, i : i + 1]) for i in range(64)], 1)
    for rows in (2, 3, 5, 6, 7, 8, 15, 16, 17, 19, 32, 64):
        begin(model, rows)
        assert torch.equal(layer(x[:, :rows]), alone[:, :rows])
        assert torch.equal(layer(x[:, 64 - rows :]), alone[:, 64 - rows :])
        begin(model, rows, 3)
        assert torch.equal(layer(x[:, :rows])[:, :rows], alone[:, :rows])


@native_only
@pytest.mark.parametrize(
    ("bits", "dtype"), [(16, torch.float32), (16, torch.bfloat16), (8, torch.float32), (4, torch.bfloat16)]
)
def test_linear_computes_many_rows_as_it_does_few(bits: int, dtype: torch.dtype) -> None:
    """They go through the weights in panels, siblings side by side."""
    model, inner = PackedWeights.create(), 4096
    assert model is not None
    layers = [model.add_linear(random(out, inner, dtype=dtype), None, bits=bits) for out in (100, 64)]
    model.join(layers)
    x = random(1, 600, inner, dtype=dtype)

    def made(first: int, end: int) -> list[Tensor]:
        begin(model, end - first)
        return [layer(x[:, first:end].contiguous()) for layer in layers]

    whole = made(0, 600)
    for first, end in ((0, 1), (47, 49), (95, 160), (590, 600)):
        for everything, some in zip(whole, made(first, end), strict=True):
            assert torch.equal(everything[:, first:end], some)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_hold_every_number_once(dtype: torch.dtype) -> None:
    weight = torch.arange(1, 20 * 6 + 1, dtype=torch.float32).view(20, 6).to(dtype)
    packed = pack_weight(weight)["data"]
    assert packed.numel() == 32 * 6
    kept = packed.flatten().sort().values
    assert kept[: 12 * 6].eq(0).all()
    assert torch.equal(kept[12 * 6 :], weight.flatten().sort().values)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class Case:
    """One attention layer in one pass."""

    shape: LayerShape
    group: int
    segments: tuple[SequenceRows, ...]
    scaling: float
    softcap: float
    window: int
    seed: int

    @property
    def rows(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.shape.heads * self.group
        return (
            random(1, heads, self.rows, self.shape.key_dim, dtype=dtype, seed=self.seed),
            random(1, self.shape.heads, self.rows, self.shape.key_dim, dtype=dtype, seed=self.seed + 1),
            random(1, self.shape.heads, self.rows, self.shape.value_dim, dtype=dtype, seed=self.seed + 2),
        )


@st.composite
def trees(draw: st.DrawFn, most: int = 9) -> tuple[int, ...]:
    count = draw(st.integers(1, most))
    return (-1, *(draw(st.integers(0, i - 1)) for i in range(1, count)))


@st.composite
def cases(draw: st.DrawFn, prompts: bool = False) -> Case:
    dims = st.one_of(st.integers(1, 40), st.sampled_from([64, 128]))  # whole 64s may go through a matrix unit
    segments = []
    slots = draw(st.permutations(range(4)))
    for slot in slots[: draw(st.integers(1, 3))]:
        length = draw(st.integers(0, 90))
        if prompts and draw(st.booleans()):
            segments.append(SequenceRows(slot, length, [0] * draw(st.integers(1, 40)), prompt=True))
        else:
            parents = draw(trees())
            segments.append(SequenceRows(slot, length, [0] * len(parents), parents))
    return Case(
        LayerShape(draw(st.integers(1, 3)), draw(dims), draw(dims)),
        draw(st.integers(1, 4)),
        tuple(segments),
        draw(st.sampled_from([1.0, 0.3])),
        draw(st.sampled_from([0.0, 0.0, 1.5])),
        draw(st.one_of(st.just(0), st.integers(1, 100))),
        draw(st.integers(0, 1000)),
    )


def cache_of(case: Case, dtype: torch.dtype) -> SlotCache:
    """A cache filled with noise: columns that a row must not see would be seen in the result."""
    cache = SlotCache([case.shape], dtype=dtype, max_slots=4)
    cache.reserve(3, max(140, *(each.length + len(each.tokens) for each in case.segments)))
    for store, seed in ((cache.keys, 3), (cache.values, 4)):
        store[0].copy_(random(*store[0].shape, seed=case.seed + seed))
    return cache


def run(case: Case, dtype: torch.dtype, how: str) -> tuple[Tensor, SlotCache]:
    """The operator's output (rows, heads, value dim), and the cache after it."""
    cache = cache_of(case, dtype)
    backend = backend_on(cache, native=how == "native", by_row=how == "by row")
    q, k, v = case.inputs(dtype)
    backend.begin(BatchPlan(case.segments), case.rows)
    out = backend.attend(q, k, v, 0, case.scaling, case.softcap, case.window)
    assert backend.calls() == 1
    assert out.shape == (1, case.rows, case.shape.heads * case.group, case.shape.value_dim)
    return out[0], cache


def oracle(case: Case, dtype: torch.dtype) -> Tensor:
    """Each row alone, in double precision, over the columns of its own path."""
    cache = cache_of(case, dtype)
    q, k, v = (x.double() for x in case.inputs(dtype))
    out, row = [], 0
    for segment in case.segments:
        count = len(segment.tokens)
        parents = segment.parents if segment.parents is not None else tuple(range(-1, count - 1))
        for i in range(count):
            path, node = [], i
            while node >= 0:
                path.insert(0, row + node)
                node = parents[node]
            keys = torch.cat([cache.keys[0][segment.slot, :, : segment.length].double(), k[0][:, path]], 1)
            values = torch.cat([cache.values[0][segment.slot, :, : segment.length].double(), v[0][:, path]], 1)
            if case.window:
                keys, values = keys[:, -case.window :], values[:, -case.window :]
            keys, values = keys.repeat_interleave(case.group, 0), values.repeat_interleave(case.group, 0)
            scores = (keys @ q[0][:, row + i, :, None])[..., 0] * case.scaling
            if case.softcap:
                scores = case.softcap * (scores / case.softcap).tanh()
            out.append((scores.softmax(-1)[:, None] @ values)[:, 0])
        row += count
    return torch.stack(out)


def assert_attention(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    # Outputs are means of standard normal values: the tolerance is absolute. bf16 rounds inputs before, the result,
    # and in plain torch the weights, each by 2^-9 of values up to about 4.
    tolerance = 2e-5 if dtype == torch.float32 else 0.04
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= tolerance


HOW = [pytest.param("native", marks=native_only), "dense", "by row"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_attention_over_trees(how: str, dtype: torch.dtype, case: Case) -> None:
    """Any tree, ragged slots, groups, odd head sizes, windows and soft caps, against one row at a time."""
    got, _ = run(case, dtype, how)
    assert_attention(got, oracle(case, dtype), dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(case=cases(prompts=True))
def test_attention_over_prompt_chunks(how: str, dtype: torch.dtype, case: Case) -> None:
    """Chunks of prompts take another kernel, and may share a pass with trees."""
    got, _ = run(case, dtype, how)
    assert_attention(got, oracle(case, dtype), dtype)


def long_case(window: int, softcap: float = 0.0, *, length: int = 250, rows: int = 330) -> Case:
    """A chunk that the kernels read in blocks of columns, as tasks of some of its rows."""
    segments = (SequenceRows(2, length, [0] * rows, prompt=True), SequenceRows(0, 30, [0] * 3, (-1, 0, 0)))
    return Case(LayerShape(2, 64, 40), 3, segments, 0.3, softcap, window, 5)


@pytest.mark.few(1)
@native_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (0, 1.5), (40, 0.0), (300, 1.5)])
def test_attention_over_long_chunks(dtype: torch.dtype, window: int, softcap: float) -> None:
    """Rows of several blocks of columns, some of them out of the window, against one row at a time."""
    case = long_case(window, softcap)
    got, _ = run(case, dtype, "native")
    assert_attention(got, oracle(case, dtype), dtype)


@native_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 200])
def test_a_row_of_a_prompt_does_not_depend_on_its_chunk(dtype: torch.dtype, window: int) -> None:
    """Bit-equal wherever its chunk begins and ends: blocks of columns begin at fixed places."""
    case = long_case(window, length=0)
    q, k, v = case.inputs(dtype)
    whole, _ = run(case, dtype, "native")
    backend = backend_on(cache_of(case, dtype), native=True)
    for first, count in ((0, 7), (7, 250), (257, 72), (329, 1)):
        backend.begin(BatchPlan([SequenceRows(2, first, [0] * count, prompt=True)]), count)
        part = (x[:, :, first : first + count] for x in (q, k, v))
        found = backend.attend(*part, 0, case.scaling, case.softcap, case.window)
        assert torch.equal(found[0], whole[first : first + count])


@pytest.mark.few(2)
@pytest.mark.parametrize("how", HOW)
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(case=cases(prompts=True))
def test_attention_writes_its_rows_and_nothing_else(how: str, case: Case) -> None:
    """Row i of a segment goes to column length + i of its slot; a stray write would spoil another request."""
    _, cache = run(case, torch.float32, how)
    expected = cache_of(case, torch.float32)
    _, k, v = case.inputs(torch.float32)
    row = 0
    for segment in case.segments:
        count = len(segment.tokens)
        for store, fresh in ((expected.keys, k), (expected.values, v)):
            store[0][segment.slot, :, segment.length : segment.length + count] = fresh[0, :, row : row + count]
        row += count
    assert torch.equal(cache.keys[0], expected.keys[0])
    assert torch.equal(cache.values[0], expected.values[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [pytest.param("native", marks=native_only), "by row"])
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(case=cases(), other=cases())
def test_a_row_does_not_depend_on_its_company(how: str, dtype: torch.dtype, case: Case, other: Case) -> None:
    """Bit-equal alone, in its tree, and beside other requests, on the same path: exact=True rests on it."""
    segment = case.segments[0]
    single = Case(case.shape, case.group, (segment,), case.scaling, case.softcap, case.window, case.seed)
    together, _ = run(case, dtype, how)
    q, k, v = case.inputs(dtype)
    count = len(segment.tokens)
    parents = segment.parents
    assert parents is not None
    for i in range(count):
        path, node = [], i
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        backend = backend_on(cache_of(single, dtype), native=how == "native", by_row=True)
        backend.begin(BatchPlan([SequenceRows(segment.slot, segment.length, [0] * len(path))]), len(path))
        part = (q[:, :, path], k[:, :, path], v[:, :, path])
        alone = backend.attend(*part, 0, case.scaling, case.softcap, case.window)[0, -1]
        assert torch.equal(alone, together[i])


@native_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("window", [0, 9])
def test_a_row_does_not_depend_on_the_pass_of_those_above_it(dim: int, dtype: torch.dtype, window: int) -> None:
    """Bit-equal whether they came before, or are rows of the same pass, at odd and even columns."""
    rows = 70
    case = Case(LayerShape(2, dim, dim), 3, (SequenceRows(1, 0, [0] * rows),), 0.3, 0.0, window, 8)
    q, k, v = case.inputs(dtype)
    whole, _ = run(case, dtype, "native")
    for steps in ((1,), (1, 2, 3), (5, 8)):
        backend = backend_on(cache_of(case, dtype), native=True)
        first, turn = 0, 0
        while first < rows:
            count = min(rows - first, steps[turn % len(steps)])
            backend.begin(BatchPlan([SequenceRows(1, first, [0] * count)]), count)
            part = (x[:, :, first : first + count] for x in (q, k, v))
            found = backend.attend(*part, 0, case.scaling, case.softcap, case.window)
            assert torch.equal(found[0], whole[first : first + count])
            first, turn = first + count, turn + 1


@native_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_nobody_wants_are_left_out_of_the_last_layer(dtype: torch.dtype) -> None:
    """The others are bit-equal to those of a whole pass, and zeros stand for these; all write their pairs."""
    case = long_case(0)
    q, k, v = case.inputs(dtype)
    whole, written = run(case, dtype, "native")
    cache = cache_of(case, dtype)
    backend = backend_on(cache, native=True)
    wanted = torch.tensor([100, 329, 332])
    backend.begin(BatchPlan(case.segments), case.rows)
    backend.want(wanted, 2)
    assert torch.equal(backend.attend(q, k, v, 0, case.scaling, case.softcap, case.window)[0], whole)
    found = backend.attend(q, k, v, 0, case.scaling, case.softcap, case.window)[0]
    assert torch.equal(found[wanted], whole[wanted]) and not found[:100].any() and not found[101:329].any()
    assert torch.equal(cache.keys[0], written.keys[0]) and torch.equal(cache.values[0], written.values[0])
    backend.begin(BatchPlan(case.segments), case.rows)
    assert torch.equal(backend.attend(q, k, v, 0, case.scaling, case.softcap, case.window)[0], whole)


@native_only
def test_rows_that_only_fill_a_pass_up_are_zero() -> None:
    """A pass may have more rows than its plan; what stands there must not be garbage."""
    case = Case(LayerShape(2, 8, 8), 2, (SequenceRows(1, 5, [0, 0, 0]),), 1.0, 0.0, 0, 0)
    cache = cache_of(case, torch.float32)
    backend = backend_on(cache, native=True)
    wide = Case(case.shape, 2, (SequenceRows(1, 5, [0] * 8),), 1.0, 0.0, 0, 0)
    q, k, v = wide.inputs(torch.float32)
    backend.begin(BatchPlan(case.segments), 8)
    out = backend.attend(q, k, v, 0, 1.0, 0.0, 0)
    assert out[0, 3:].eq(0).all()
    assert out[0, :3].ne(0).all()
    before = cache_of(case, torch.float32)
    assert torch.equal(cache.keys[0][1, :, 8:], before.keys[0][1, :, 8:])


@native_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "of", "rows", "length", "key_dim", "value_dim"),
    [
        (1, 1, 1, 1, 8, 8),
        (4, 4, 33, 33, 16, 16),
        (6, 2, 700, 700, 24, 40),
        (2, 2, 5, 600, 64, 64),
        (2, 1, 515, 70, 10, 6),
    ],
)
def test_all_rows_of_a_source_see_all_of_it(
    heads: int, of: int, rows: int, length: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    """Against torch's attention in float64; the rows are those of a transposed view, as a projection gives them."""
    q = random(1, rows, heads, key_dim, dtype=dtype).transpose(1, 2)
    k = random(1, length, of, key_dim, dtype=dtype, seed=1).transpose(1, 2)
    v = random(1, length, of, value_dim, dtype=dtype, seed=2).transpose(1, 2)
    found = torch.ops.sakiyomi_cpu.attend_source(q, k, v, 0.3)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.3, enable_gqa=True)
    assert (found.shape, found.dtype) == ((1, rows, heads, value_dim), dtype)
    allowed = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), wanted.transpose(1, 2), atol=allowed, rtol=allowed)


@native_only
def test_attention_survives_extreme_scores() -> None:
    """Scores far apart underflow to exact zeros, equal ones share; never a NaN."""
    case = Case(LayerShape(1, 4, 4), 1, (SequenceRows(0, 40, [0, 0]),), 1.0, 0.0, 0, 0)
    cache = cache_of(case, torch.float32)
    backend = backend_on(cache, native=True)
    q, k, v = (x.clone() for x in case.inputs(torch.float32))
    cache.keys[0][0, 0, :40] = 0
    cache.keys[0][0, 0, 7] = torch.tensor([200.0, 0, 0, 0])
    q[0, 0, 0] = torch.tensor([10.0, 0, 0, 0])
    q[0, 0, 1] = 0
    backend.begin(BatchPlan(case.segments), case.rows)
    out = backend.attend(q, k, v, 0, 1.0, 0.0, 0)[0, :, 0]
    torch.testing.assert_close(out[0], cache.values[0][0, 0, 7])
    torch.testing.assert_close(out[1], torch.cat([cache.values[0][0, 0, :40], v[0, 0]]).mean(0), atol=1e-5, rtol=1e-5)


@native_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 0, 2)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_siblings_give_what_each_gives_alone(dtype: torch.dtype, order: tuple[int, ...], rows: int) -> None:
    """In whatever order they are called, twice or not at all; and on another input."""
    joined, alone = PackedWeights.create(), PackedWeights.create()
    assert joined is not None and alone is not None
    weights = [(random(out, 96, dtype=dtype), random(out, dtype=dtype) if out == 70 else None) for out in (130, 70, 16)]
    together = [joined.add_linear(*weight) for weight in weights]
    single = [alone.add_linear(*weight) for weight in weights]
    joined.join(together)
    for seed in range(3):
        x = random(1, rows, 96, dtype=dtype, seed=seed)
        begin(alone, rows)
        expected = [layer(x) for layer in single]
        begin(joined, rows)
        for i in order:
            assert torch.equal(together[i](x), expected[i])
        other = random(1, rows, 96, dtype=dtype, seed=seed + 10)
        found = [layer(other) for layer in together]
        begin(alone, rows)
        assert all(torch.equal(a, layer(other)) for a, layer in zip(found, single, strict=True))


# ---------------------------------------------------------------- plans


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(parents=trees(), length=st.integers(0, 30), window=st.integers(0, 40))
def test_a_plan_shows_each_row_its_own_path(parents: tuple[int, ...], length: int, window: int) -> None:
    """Positions count depth, not columns; a window counts positions, not columns."""
    plan = BatchPlan([SequenceRows(0, 4, [1, 2]), SequenceRows(1, length, list(range(len(parents))), parents)])
    depths = [0] * len(parents)
    for i, parent in enumerate(parents):
        depths[i] = 0 if parent < 0 else depths[parent] + 1
    assert plan.positions == [4, 5] + [length + depth for depth in depths]
    assert plan.tokens == [1, 2, *range(len(parents))]
    seen = plan.visible(1, window)
    for i in range(len(parents)):
        path, node = [], i
        while node >= 0:
            path.insert(0, length + node)
            node = parents[node]
        columns = [*range(length), *path]
        assert seen[i].nonzero().flatten().tolist() == (columns[-window:] if window else columns)


@native_only
def test_filler_rows_are_not_computed() -> None:
    """A pass of eight rows of which five are real costs five: the others come back as zeros, and are nobody's."""
    model = PackedWeights.create()
    assert model is not None
    weight, x = random(20, 8), random(1, 8, 8)
    layer = model.add_linear(weight, None)
    begin(model, 5, 3)
    got = layer(x)
    torch.testing.assert_close(got[:, :5], F.linear(x, weight)[:, :5], rtol=1e-5, atol=1e-5)
    assert not got[:, 5:].any()
