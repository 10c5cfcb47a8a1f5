"""Weights in the block formats of GGUF files, in the kernels' order.

A block format stores integer codes of 2 to 8 bits. 16 or 32 neighbours in a row share a scale and, in some formats, a
minimum::

    number = scale * (code - offset) + low        or        scale * table[code]

Where 256 numbers make a block (the K formats), the scale of a group is an integer factor times the block's scale. The
kernels keep these parts as they are, so that no number changes; only their order does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32  # output channels side by side, as blocks.h reads them
TILE = 32  # inputs whose codes lie together
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Numbers for which the codes of IQ4_NL and IQ4_XS stand."""
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers for which the codes of MXFP4 stand: 1 bit of sign, 2 of exponent, 1 of fraction."""


class BlockFormat(NamedTuple):
    """How the kernels keep a block format.

    Attributes:
        number: GGML's.
        bits: of a code; 16 and 32: numbers of floating point, without scales.
        length: inputs of a block, which have a scale in common.
        group: inputs of a group.
        offset: a code stands for itself less this.
        table: the numbers for which codes stand; None: they stand for themselves.
        low: there are minimums.
        factors: bits of a group's own factor; 0: the block is the group.
    """

    number: int
    bits: int
    length: int = 32
    group: int = 32
    offset: int = 0
    table: tuple[int, ...] | None = None
    low: bool = False
    factors: int = 0

    @property
    def header(self) -> int:
        """Bytes of the scales and minimums of a block of 32 output channels."""
        if self.bits > 8:
            return 0
        each = 2 if self.low else 1
        return 64 * each + self.length // self.group * BLOCK * self.factors // 8 * each

    def size(self, outputs: int, inputs: int) -> int:
        """Bytes of a packed weight."""
        tiles = -(-inputs // TILE)
        blocks = inputs // self.length if self.bits <= 8 else 0
        return -(-outputs // BLOCK) * (blocks * self.header + tiles * TILE * BLOCK * self.bits // 8)


FORMATS = {
    "F32": BlockFormat(0, 32, 1),
    "F16": BlockFormat(1, 16, 1),
    "BF16": BlockFormat(30, 16, 1),
    "Q4_0": BlockFormat(2, 4, offset=8),
    "Q4_1": BlockFormat(3, 4, low=True),
    "Q5_0": BlockFormat(6, 5, offset=16),
    "Q5_1": BlockFormat(7, 5, low=True),
    "Q8_0": BlockFormat(8, 8, offset=128),
    "Q2_K": BlockFormat(10, 2, 256, 16, low=True, factors=4),
    "Q3_K": BlockFormat(11, 3, 256, 16, offset=4, factors=8),
    "Q4_K": BlockFormat(12, 4, 256, low=True, factors=8),
    "Q5_K": BlockFormat(13, 5, 256, low=True, factors=8),
    "Q6_K": BlockFormat(14, 6, 256, 16, offset=32, factors=8),
    "IQ4_NL": BlockFormat(20, 4, table=IQ4),
    "IQ4_XS": BlockFormat(23, 4, 256, table=IQ4, factors=8),
    "MXFP4": BlockFormat(39, 4, table=FP4),
}
"""By the name that GGML has for them."""


class Blocks(NamedTuple):
    """How a layer in a block format is multiplied.

    Attributes:
        name: of its format.
        rounded: rows are rounded to 8 bits, each 32 neighbours with a scale, and products are whole numbers; otherwise
            rows stay as they are, and are multiplied by the weight's numbers.
    """

    name: str
    rounded: bool


class Parts(NamedTuple):
    """Rows of a weight in a block format, its parts apart.

    Attributes:
        codes: uint8 `(rows, in)`; of formats without scales the numbers themselves.
        scales: `(rows, in / length)`, float16, of MXFP4 bfloat16.
        lows: float16, the same of minimums; None: the format has none.
        factors: int8 `(rows, in / group)`, by which a block's scale is multiplied; None: the block is one group.
        low_factors: int8, the same of minimums.
    """

    codes: Tensor
    scales: Tensor | None = None
    lows: Tensor | None = None
    factors: Tensor | None = None
    low_factors: Tensor | None = None


def numbers(name: str, parts: Parts) -> Tensor:
    """The numbers for which parts stand, float32 `(rows, in)`."""
    form = FORMATS[name]
    if parts.scales is None:
        return parts.codes.float()
    scales, lows = parts.scales.float(), None if parts.lows is None else parts.lows.float()
    if parts.factors is not None:
        scales = (scales[..., None] * parts.factors.float().unflatten(1, (scales.shape[1], -1))).flatten(1)
        if lows is not None and parts.low_factors is not None:
            lows = (lows[..., None] * parts.low_factors.float().unflatten(1, (lows.shape[1], -1))).flatten(1)
    if form.table is None:
        codes = parts.codes.float().sub_(form.offset)
    else:
        codes = torch.tensor(form.table, dtype=torch.float32)[parts.codes.int()]
    found: Tensor = codes.unflatten(1, (scales.shape[1], -1)).mul_(scales[..., None])
    if lows is not None:
        found.add_(lows[..., None])
    return found.flatten(1)


def pack_blocks(name: str, parts: Parts) -> Tensor:
    """Rows of a weight in the kernels' order, see blocks.h.

    Returns:
        uint8 `(ceil(rows / 32), bytes)`: of 32 output channels one block after the other, each a header and the codes
        of 32 inputs after 32 inputs.
    """
    form = FORMATS[name]
    rest = (part if part is None else _whole(part, BLOCK, 0) for part in parts[1:])
    parts = Parts(_whole(parts.codes, BLOCK, 0), *rest)
    if form.bits > 8:
        tiles = _whole(parts.codes, TILE, 1).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, TILE))
        found: Tensor = tiles.permute(0, 2, 3, 1).contiguous()
        return found.flatten(1).view(torch.uint8)
    steps = parts.codes.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, form.length // TILE, 8, 4))
    steps = steps.permute(0, 2, 3, 4, 1, 5).flatten(4).unflatten(4, (2, 64))  # (.., blocks, tiles, 8, 2, 64)
    codes = torch.cat([plane.flatten(3) for plane in _code_planes(steps, form.bits)], 3)
    return torch.cat([*_header(form, parts), codes.flatten(2)], 2).flatten(1)


def _whole(part: Tensor, multiple: int, dimension: int) -> Tensor:
    """With zeros at the end, up to a multiple."""
    lacking = -part.shape[dimension] % multiple
    if not lacking:
        return part
    shape = list(part.shape)
    shape[dimension] = lacking
    return torch.cat([part, part.new_zeros(shape)], dimension)


def _code_planes(steps: Tensor, bits: int) -> list[Tensor]:
    """Codes `(.., 8, 2, 64)` as planes of bits, each `(.., n, bytes)`.

    Of four inputs the codes of 32 channels are two vectors of 64 bytes. A plane of 4 bits has them in the halves of 64
    bytes, one of 2 bits those of eight inputs in the quarters, and one of 1 bit in 16 bytes.
    """
    if bits == 8:
        return [steps]
    if bits in (4, 5, 6):
        lower = steps & 15
        planes, rest = [lower[..., 0, :] | lower[..., 1, :] << 4], steps >> 4
    else:
        planes, rest = [_quarters(steps & 3)], steps >> 2
    if bits == 6:
        planes.append(_quarters(rest))
    elif bits in (3, 5):
        each = rest.unflatten(-1, (8, 8)) << torch.arange(8, dtype=torch.uint8)
        planes.append(each.sum(-1, dtype=torch.uint8).flatten(-2))
    return planes


def _quarters(codes: Tensor) -> Tensor:
    """Codes of 2 bits, `(.., 8, 2, 64)`, as `(.., 4, 64)`."""
    four: Tensor = codes.unflatten(-3, (4, 2)).flatten(-3, -2) << torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    return four.sum(-2, dtype=torch.uint8)


def _header(form: BlockFormat, parts: Parts) -> list[Tensor]:
    """Scales, minimums and factors of each block, uint8 `(rows / 32, blocks, bytes)` each."""
    assert parts.scales is not None
    blocks = parts.scales.shape[1]

    def beside(part: Tensor) -> Tensor:  # (rows, blocks * n) as (rows / 32, blocks, n * 32) numbers
        found: Tensor = part.unflatten(0, (-1, BLOCK)).unflatten(2, (blocks, -1))
        return found.permute(0, 2, 3, 1).contiguous().flatten(2).view(torch.uint8)

    found = [beside(part) for part in (parts.scales, parts.lows) if part is not None]
    if parts.factors is not None:
        factors = [beside(part) for part in (parts.factors, parts.low_factors) if part is not None]
        found += factors if form.factors == 8 else [factors[0] | factors[1] << 4]
    return found
