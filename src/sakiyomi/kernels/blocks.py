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
