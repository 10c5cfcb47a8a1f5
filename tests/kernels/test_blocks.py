"""Weights in the block formats of GGUF files: the kernels against their numbers in float32."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import quants
from torch import Tensor
from torch.nn import functional

from backends import begin
from sakiyomi import LoadError
from sakiyomi.kernels.blocks import FORMATS
from sakiyomi.kernels.native import PackedLinear, PackedWeights
from sakiyomi.kernels.pack import join_siblings
from sakiyomi.model_executor.gguf.blocks import (
    BLOCK_TYPES,
    add_embedding,
    add_experts,
    add_linear,
    dequantize,
    share_embedding,
)
from sakiyomi.model_executor.loading.recording import undeprecated

pytestmark = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
ROWS = (*range(1, 41), 300)
SCALED = [name for name, form in FORMATS.items() if form.bits <= 8]
WRITTEN = [name for name in SCALED if "quantize_blocks" in vars(getattr(quants, name))]
"""Those that the package gguf writes."""


@pytest.fixture
def table() -> PackedWeights:
    """A table whose layers can be called."""
    made = PackedWeights.create()
    assert made is not None
    begin(made, 0)
    return made


def random_blocks(name: str, rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Random bytes, uint8 (rows, bytes), whose scales are finite and of both signs."""
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(seed)
    if kind.number_dtype is not None:
        return torch.randn(rows, inputs, generator=generator).to(kind.number_dtype).view(torch.uint8)
    data = torch.randint(0, 256, (rows, kind.row_bytes(inputs)), dtype=torch.uint8, generator=generator)
    blocks, at = data.unflatten(1, (-1, kind.bytes)), 0
    for field, size in kind.fields.items():
        if field in ("scale", "low"):
            scales = (torch.randn(*blocks.shape[:2], 1, generator=generator) / 64).half()
            blocks[..., at : at + 2] = scales.view(torch.uint8)
        elif field == "exponent":
            blocks[..., at] = torch.randint(115, 130, blocks.shape[:2], generator=generator).to(torch.uint8)
        at += size
    return data


def written_blocks(name: str, rows: int, inputs: int) -> Tensor:
    """What the package gguf makes of normal numbers."""
    weight = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).numpy()
    return torch.from_numpy(quants.quantize(weight, gguf.GGMLQuantizationType[name]))


def rounded(rows: Tensor) -> Tensor:
    """Rows as the kernels multiply them in bytes: each 32 neighbours with a scale."""
    groups = rows.float().unflatten(1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    return ((groups * inverse).round() * (largest / 127)).flatten(1)


def some_rows(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Rows whose numbers differ in size, some of them zeros in a group of 32."""
    rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)) * torch.logspace(-2, 1, inputs)
    rows[count // 2, 32:64] = 0.0
    return rows.to(dtype)


def check(layer: PackedLinear, numbers: Tensor, bias: Tensor | None, counts: tuple[int, ...] = ROWS) -> None:
    """Compare a layer with the product of its numbers, rows of so many."""
    for count in counts:
        rows = some_rows(count, layer.in_features, layer.dtype)
        bytes_too = layer.blocks is not None and layer.blocks.rounded and FORMATS[layer.blocks.name].bits <= 8
        given = rounded(rows) if bytes_too else rows.float()
        expected = functional.linear(given.double(), numbers.double(), None if bias is None else bias.double())
        error = (layer(rows).double() - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if layer.dtype == torch.float32 else 5e-3), (layer, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_numbers(table: PackedWeights, name: str, way: bool, dtype: torch.dtype) -> None:
    """Output channels that are no multiple of 32, a bias or none, all counts of rows."""
    for out, inputs, biased in ((70, 512, True), (32, 256, False), (1, 1024, True)):
        data, bias = random_blocks(name, out, inputs), torch.randn(out) if biased else None
        check(add_linear(table, name, data, bias, dtype, rounded=way), dequantize(name, data), bias)


@pytest.mark.parametrize("inputs", [32, 96, 288, 576])
@pytest.mark.parametrize("name", [name for name in SCALED if FORMATS[name].length == 32])
def test_odd_numbers_of_blocks(table: PackedWeights, name: str, inputs: int) -> None:
    """Rows that are no multiples of 64, 128 or 256 numbers."""
    data = random_blocks(name, 40, inputs)
    for way in (False, True):
        layer = add_linear(table, name, data, None, torch.float32, rounded=way)
        check(layer, dequantize(name, data), None, (1, 2, 9, 33, 100))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_numbers_of_any_length(table: PackedWeights, name: str) -> None:
    """Types without blocks have rows of any length, even ones where layers of that dtype are packed without blocks."""
    for dtype in (torch.float32, torch.bfloat16):
        data = random_blocks(name, 33, 70)
        check(add_linear(table, name, data, None, dtype), dequantize(name, data), None, (1, 5, 40))


@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_that_the_package_gguf_writes(table: PackedWeights, name: str) -> None:
    """A layer of normal numbers."""
    data = written_blocks(name, 64, 512)
    for way in (False, True):
        check(add_linear(table, name, data, None, torch.float32, rounded=way), dequantize(name, data), None, (1, 40))


@pytest.mark.parametrize("way", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_the_others(table: PackedWeights, name: str, way: bool) -> None:
    """To the last bit, whatever path so many rows take."""
    layer = add_linear(table, name, random_blocks(name, 70, 512), None, torch.float32, rounded=way)
    rows = some_rows(130, 512, torch.float32)
    alone = torch.cat([layer(row[None]) for row in rows])
    for count in (2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 48, 49, 97, 130):
        assert torch.equal(layer(rows[:count]), alone[:count]), count


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_take_no_more_than_the_file(table: PackedWeights, name: str) -> None:
    """Little more where factors of 6 bits become bytes."""
    data = random_blocks(name, 64, 512)
    layer = add_linear(table, name, data, None, torch.float32)
    size = layer.tensors()["data"].nbytes
    assert size <= 1.1 * data.nbytes
    assert layer.blocks is None or size == FORMATS[name].size(64, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_embeddings_are_rows_of_the_numbers(table: PackedWeights, name: str, dtype: torch.dtype) -> None:
    """To the last bit, in a pass and between passes, of an embedding of its own and of a head's weight."""
    data = random_blocks(name, 70, 512)
    numbers = dequantize(name, data).to(dtype)
    ids = torch.tensor([[0, 69, 31], [32, 5, 5]])
    made = [add_embedding(table, name, data, dtype)]
    head = add_linear(table, name, data, None, dtype)
    if head.blocks is not None:
        made.append(share_embedding(table, head, scale=3.0))
        assert made[1].tensors()["data"] is head.tensors()["data"]
    for embedding in made:
        assert torch.equal(embedding(ids), numbers[ids] * embedding.scale)
        assert torch.equal(embedding.weight, numbers)
        assert embedding.weight.dtype == dtype
        with pytest.raises(IndexError):
            embedding.rows(torch.tensor([70]))
        with pytest.raises(IndexError):
            embedding(torch.tensor([-1]))
        with undeprecated():
            recorded = torch.jit.trace(embedding, ids, check_trace=False)
        assert torch.equal(recorded(ids.flip(1)), numbers[ids.flip(1)] * embedding.scale)
        with pytest.raises(RuntimeError, match="a row that is none"):
            recorded(torch.tensor([-1]))


@pytest.mark.parametrize("name", ["F16", "Q4_1", "Q6_K", "IQ4_XS", "MXFP4"])
def test_experts(table: PackedWeights, name: str) -> None:
    """Each row by its own expert."""
    data = random_blocks(name, 3 * 40, 256).unflatten(0, (3, 40))
    biases, rows = torch.randn(3, 40), some_rows(7, 256, torch.float32)
    chosen = torch.tensor([[0, 2], [1, 0], [2, 2], [0, 1], [1, 2], [2, 0], [0, 0]])
    found = add_experts(table, name, data, biases, torch.float32)(rows, chosen).view(7, 2, 40)
    for expert in range(3):
        alone = add_linear(table, name, data[expert], biases[expert], torch.float32)(rows)
        for row, choices in enumerate(chosen.tolist()):
            for place, choice in enumerate(choices):
                assert choice != expert or torch.equal(found[row, place], alone[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [5, 48])
def test_layers_of_several_formats_are_computed_together(table: PackedWeights, count: int, dtype: torch.dtype) -> None:
    """As q, k and v of a file whose values have more bits; beside layers that are in no blocks."""
    rows = some_rows(count, 512, dtype)[None]
    names = ("Q4_K", "Q4_K", "Q6_K", "Q8_0", "F16", "F32", "BF16")
    layers = [
        add_linear(table, name, random_blocks(name, 64 + 8 * i, 512, i), None, dtype, rounded=i != 1)
        for i, name in enumerate(names)
    ]
    layers += [table.add_linear(torch.randn(40, 512).to(dtype), None, bits=bits) for bits in (4, 8, 16)]
    alone = [layer(rows) for layer in layers]
    join_siblings(table, layers)
    begin(table, count)
    for layer, expected in zip(layers, alone, strict=True):
        assert torch.equal(layer(rows), expected)


def test_numbers_that_are_none_are_seen(table: PackedWeights) -> None:
    """A row with a NaN gives none that looks like one."""
    layer = add_linear(table, "Q4_0", random_blocks("Q4_0", 32, 64), None, torch.float32)
    rows = torch.ones(2, 64)
    rows[1, 40] = float("nan")
    found = layer(rows)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.mark.parametrize("name", SCALED)
def test_wrong_bytes_are_refused(table: PackedWeights, name: str) -> None:
    """Before anything is packed."""
    data = random_blocks(name, 32, 512)
    for wrong in (data[:, :-1], data.float(), data[0]):
        with pytest.raises(LoadError, match="expected uint8"):
            add_linear(table, name, wrong, None, torch.float32)
