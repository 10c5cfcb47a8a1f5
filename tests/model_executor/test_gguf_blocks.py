"""The block types of GGUF files: their numbers, against the package gguf."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from sakiyomi import LoadError
from sakiyomi.model_executor.gguf.blocks import BLOCK_TYPES, TYPE_NAMES, dequantize


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_numbers_are_those_of_gguf_to_the_last_bit(name: str, rows: int) -> None:
    """Random bytes: every code, factor and scale, numbers that are none among them."""
    kind, theirs = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    data = np.random.default_rng(rows).integers(0, 256, (rows, kind.row_bytes(1024)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = np.ascontiguousarray(quants.dequantize(data, theirs), np.float32)
    found = dequantize(name, torch.from_numpy(data)).numpy()
    assert found.shape == expected.shape == (rows, 1024)
    equal = found.view(np.uint32) == expected.view(np.uint32)
    assert (equal | np.isnan(found) & np.isnan(expected)).all()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_types_are_those_of_gguf(name: str) -> None:
    """Numbers, elements and bytes."""
    kind, theirs = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    assert (kind.number, kind.elements, kind.bytes) == (theirs.value, *gguf.GGML_QUANT_SIZES[theirs])
    assert TYPE_NAMES[kind.number] == name


def test_every_exponent_of_mxfp4() -> None:
    """From the smallest number that float32 knows to those beyond its largest."""
    data = np.zeros((256, 17), np.uint8)
    data[:, 0], data[:, 1:] = np.arange(256), np.arange(16)
    with np.errstate(over="ignore"):
        expected = quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(dequantize("MXFP4", torch.from_numpy(data)).numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("name", [name for name, kind in BLOCK_TYPES.items() if kind.elements > 1])
def test_rows_that_are_no_whole_blocks_are_refused(name: str) -> None:
    """Each with what was got and what was expected."""
    kind = BLOCK_TYPES[name]
    with pytest.raises(LoadError, match=f"expected uint8 .*{kind.bytes}|{kind.bytes} bytes: expected"):
        dequantize(name, torch.zeros(2, kind.bytes + 1, dtype=torch.uint8))
    with pytest.raises(LoadError, match="expected uint8"):
        dequantize(name, torch.zeros(kind.bytes, dtype=torch.uint8))
    with pytest.raises(LoadError, match=f"whose blocks have {kind.elements}"):
        kind.row_bytes(kind.elements + 16)


def test_no_rows() -> None:
    """Nothing, of the right width."""
    assert dequantize("Q4_K", torch.empty(0, 288, dtype=torch.uint8)).shape == (0, 512)
