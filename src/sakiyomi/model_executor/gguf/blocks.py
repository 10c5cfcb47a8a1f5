"""The block types of GGUF files: how a row of numbers lies there, and the same as float32.

A row is a sequence of blocks of `elements` numbers and `bytes` bytes each. A block's bytes are its scale, its minimum,
factors of its groups, and codes in one or several planes of bits, in an order that each type has of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sakiyomi.core.errors import LoadError
from sakiyomi.kernels.blocks import Blocks, Parts, numbers
from sakiyomi.kernels.native import PackedEmbedding, PackedExperts, PackedLinear, PackedWeights

_PIECE = 1 << 20  # numbers that are dequantized at once


@dataclass(frozen=True)
class BlockType:
    """A type of tensors in GGUF files.

    Attributes:
        name, number: GGML's.
        elements: numbers of a block.
        fields: bytes of a block's parts, by name, in their order.
        split: takes these fields `(rows, blocks, bytes)` apart.
    """

    name: str
    number: int
    elements: int
    fields: Mapping[str, int]
    split: Callable[[Mapping[str, Tensor]], Parts]

    @property
    def bytes(self) -> int:
        """Of a block."""
        return sum(self.fields.values())

    @property
    def number_dtype(self) -> torch.dtype | None:
        """Of numbers that are no codes."""
        return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(self.name)

    def row_elements(self, data: Tensor) -> int:
        """Numbers of a row of bytes `(..., bytes)`.

        Raises:
            LoadError: the bytes are no whole blocks.
        """
        if data.dtype != torch.uint8 or data.ndim < 2 or data.shape[-1] % self.bytes:
            raise LoadError(
                f"got {tuple(data.shape)} of {data.dtype} as rows of {self.name}, whose blocks have {self.bytes} "
                "bytes: expected uint8 (rows, a multiple of that)"
            )
        return data.shape[-1] // self.bytes * self.elements

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of so many numbers.

        Raises:
            LoadError: they are not whole blocks.
        """
        if elements % self.elements:
            raise LoadError(
                f"a row of {elements} numbers cannot be {self.name}, whose blocks have {self.elements}: the file is "
                "damaged, or of a kind that this version does not know"
            )
        return elements // self.elements * self.bytes

    def parts(self, data: Tensor) -> Parts:
        """Rows, uint8 `(rows, bytes)`, taken apart.

        Raises:
            LoadError: the bytes are no whole blocks.
        """
        self.row_elements(data)
        blocks = data.unflatten(1, (-1, self.bytes))
        return self.split(dict(zip(self.fields, blocks.split(list(self.fields.values()), 2), strict=True)))


def dequantize(name: str, data: Tensor) -> Tensor:
    """The numbers of a tensor.

    Args:
        name: of its type, as in `BLOCK_TYPES`.
        data: its rows, uint8 `(rows, bytes)`.

    Returns:
        float32 `(rows, elements)`, each number as GGML's own reference computes it.

    Raises:
        LoadError: the bytes are no whole blocks.
    """
    kind = BLOCK_TYPES[name]
    width = kind.row_elements(data)
    found = torch.empty(len(data), width)
    step = max(1, _PIECE // max(1, width))
    for first in range(0, len(data), step):
        found[first : first + step] = numbers(name, kind.parts(data[first : first + step]))
    return found


def _planes(field: Tensor, bits: int, chunk: int) -> Tensor:
    """Codes of a field `(rows, blocks, bytes)`: of each `chunk` bytes the lowest bits first, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    codes: Tensor = (field.unflatten(2, (-1, 1, chunk)) >> shifts) & (2**bits - 1)
    return codes.flatten(2)


def _halves(field: Tensor) -> Tensor:
    """float16 numbers, `(rows, blocks, n)` flattened to `(rows, blocks * n)`."""
    return field.contiguous().view(torch.float16).flatten(1)


def _split_numbers(dtype: torch.dtype) -> Callable[[Mapping[str, Tensor]], Parts]:
    """Numbers of floating point."""
    return lambda fields: Parts(fields["codes"].contiguous().flatten(1).view(dtype))


def _split_simple(fields: Mapping[str, Tensor]) -> Parts:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL: 4 bits of each code, the fifth ones in a number of 32 bits."""
    codes = _planes(fields["codes"], 4, 16)
    if "high" in fields:
        codes |= _planes(fields["high"], 1, 1) << 4
    return Parts(codes.flatten(1), _halves(fields["scale"]), _halves(fields["low"]) if "low" in fields else None)


def _split_q8_0(fields: Mapping[str, Tensor]) -> Parts:
    """Signed bytes, which are made positive by 128."""
    return Parts((fields["codes"] ^ 128).flatten(1), _halves(fields["scale"]))


def _split_mxfp4(fields: Mapping[str, Tensor]) -> Parts:
    """A scale is 2 ** (exponent - 127), here halved, since the numbers of the table are doubled."""
    exponent = fields["exponent"].flatten(1).to(torch.int16)
    # As bfloat16, whose fraction has 7 bits: 2 ** -128 and 2 ** -127 are below its normal numbers.
    bits = torch.where(exponent < 2, 0x20 << exponent.clamp_max(1), (exponent - 1).clamp_min(0) << 7)
    return Parts(_planes(fields["codes"], 4, 16).flatten(1), bits.to(torch.int16).view(torch.bfloat16))


def _split_q2_k(fields: Mapping[str, Tensor]) -> Parts:
    """Factors of scales and of minimums, 4 bits each, share a byte."""
    codes, factors = _planes(fields["codes"], 2, 32), fields["factors"].flatten(1)
    both = (factors & 15).view(torch.int8), (factors >> 4).view(torch.int8)
    return Parts(codes.flatten(1), _halves(fields["scale"]), -_halves(fields["low"]), *both)


def _split_q3_k(fields: Mapping[str, Tensor]) -> Parts:
    """The third bits lie apart; factors have 6 bits, 4 and 2 of which lie apart, and 32 is added to them."""
    codes = _planes(fields["codes"], 2, 32) | _planes(fields["high"], 1, 32) << 2
    lower, upper = fields["factors"].split([8, 4], 2)
    factors = _planes(lower, 4, 8) | _planes(upper, 2, 4) << 4
    return Parts(codes.flatten(1), _halves(fields["scale"]), None, factors.flatten(1).view(torch.int8) - 32)


def _split_q4_k(fields: Mapping[str, Tensor]) -> Parts:
    """Q4_K, Q5_K: factors of scales and of minimums have 6 bits, of the last four of each 4 and 2 lie apart."""
    codes = _planes(fields["codes"], 4, 32)
    if "high" in fields:
        codes |= _planes(fields["high"], 1, 32) << 4
    first, second, rest = fields["factors"].split(4, 2)
    factors = torch.cat([first & 63, rest & 15 | first >> 2 & 48], 2)
    low_factors = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], 2)
    both = factors.flatten(1).view(torch.int8), low_factors.flatten(1).view(torch.int8)
    return Parts(codes.flatten(1), _halves(fields["scale"]), -_halves(fields["low"]), *both)


def _split_q6_k(fields: Mapping[str, Tensor]) -> Parts:
    """4 and 2 bits of a code lie apart; factors are signed bytes."""
    codes = _planes(fields["codes"], 4, 64) | _planes(fields["high"], 2, 32) << 4
    factors = fields["factors"].contiguous().flatten(1).view(torch.int8)
    return Parts(codes.flatten(1), _halves(fields["scale"]), None, factors)


def _split_iq4_xs(fields: Mapping[str, Tensor]) -> Parts:
    """Factors have 6 bits, 4 and 2 of which lie apart, and 32 is added to them."""
    factors = _planes(fields["lower"], 4, 1) | _planes(fields["upper"], 2, 1) << 4
    codes = _planes(fields["codes"], 4, 16)
    return Parts(codes.flatten(1), _halves(fields["scale"]), None, factors.flatten(1).view(torch.int8) - 32)


def _type(
    name: str, number: int, elements: int, split: Callable[[Mapping[str, Tensor]], Parts], **fields: int
) -> BlockType:
    return BlockType(name, number, elements, fields, split)


BLOCK_TYPES: Mapping[str, BlockType] = {
    kind.name: kind
    for kind in (
        _type("F32", 0, 1, _split_numbers(torch.float32), codes=4),
        _type("F16", 1, 1, _split_numbers(torch.float16), codes=2),
        _type("BF16", 30, 1, _split_numbers(torch.bfloat16), codes=2),
        _type("Q4_0", 2, 32, _split_simple, scale=2, codes=16),
        _type("Q4_1", 3, 32, _split_simple, scale=2, low=2, codes=16),
        _type("Q5_0", 6, 32, _split_simple, scale=2, high=4, codes=16),
        _type("Q5_1", 7, 32, _split_simple, scale=2, low=2, high=4, codes=16),
        _type("Q8_0", 8, 32, _split_q8_0, scale=2, codes=32),
        _type("Q2_K", 10, 256, _split_q2_k, factors=16, codes=64, scale=2, low=2),
        _type("Q3_K", 11, 256, _split_q3_k, high=32, codes=64, factors=12, scale=2),
        _type("Q4_K", 12, 256, _split_q4_k, scale=2, low=2, factors=12, codes=128),
        _type("Q5_K", 13, 256, _split_q4_k, scale=2, low=2, factors=12, high=32, codes=128),
        _type("Q6_K", 14, 256, _split_q6_k, codes=128, high=64, factors=16, scale=2),
        _type("IQ4_NL", 20, 32, _split_simple, scale=2, codes=16),
        _type("IQ4_XS", 23, 256, _split_iq4_xs, scale=2, upper=2, lower=4, codes=128),
        _type("MXFP4", 39, 32, _split_mxfp4, exponent=1, codes=16),
    )
}
"""By name."""
TYPE_NAMES: Mapping[int, str] = {kind.number: kind.name for kind in BLOCK_TYPES.values()}
"""By GGML's number."""


def add_linear(
    table: PackedWeights, name: str, data: Tensor, bias: Tensor | None, dtype: torch.dtype, *, rounded: bool = True
) -> PackedLinear:
    """A linear layer whose weight is a tensor of a GGUF file; its numbers stay as they are.

    Args:
        table: the model's, in the kernels.
        name: of the tensor's type.
        data: its rows, uint8 `(out, bytes)`.
        bias: of the layer, or none.
        dtype: of the layer's rows: float32 or bfloat16.
        rounded: rows are rounded to 8 bits, each 32 neighbours with a scale; see ``Blocks``. Types without scales
            (F32, F16, BF16) are always multiplied by rows as they are.

    Raises:
        LoadError: the bytes are no whole blocks.
    """
    kind = BLOCK_TYPES[name]
    if kind.number_dtype is dtype:
        return table.add_linear(kind.parts(data).codes, bias)
    return table.add_blocks(data, bias, kind.row_elements(data), dtype, Blocks(name, rounded))


def add_embedding(
    table: PackedWeights, name: str, data: Tensor, dtype: torch.dtype, *, scale: float = 1.0
) -> PackedEmbedding:
    """An embedding, likewise. Of one that is the head's weight, too, ``share_embedding`` makes one.

    Args:
        table, name, data, dtype: as above.
        scale: by which rows are multiplied.
    """
    kind = BLOCK_TYPES[name]
    blocks = Blocks(name, rounded=False)
    return table.add_block_embedding(data, kind.row_elements(data), dtype, blocks, scale)


def share_embedding(table: PackedWeights, layer: PackedLinear, *, scale: float = 1.0) -> PackedEmbedding:
    """The embedding whose rows are a layer's weight in a block format."""
    assert layer.blocks is not None, "made by add_linear of another type than the rows'"
    return table.adopt_embedding(
        layer.tensors(), layer.in_features, layer.out_features, layer.dtype, layer.blocks, scale
    )


def add_experts(
    table: PackedWeights, name: str, data: Tensor, biases: Tensor | None, dtype: torch.dtype, *, rounded: bool = True
) -> PackedExperts:
    """A stack of experts, likewise, of uint8 `(count, out, bytes)` and biases `(count, out)` or none."""
    kind = BLOCK_TYPES[name]
    if kind.number_dtype is dtype:
        stack = kind.parts(data.flatten(0, 1)).codes.unflatten(0, data.shape[:2])
        return table.add_experts(stack, biases)
    inputs = kind.row_elements(data)
    return table.add_block_experts(data, biases, inputs, dtype, Blocks(name, rounded))
