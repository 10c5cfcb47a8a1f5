"""Memory for packed weights: tensors of their own, on huge pages, freed when nobody holds them."""

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sakiyomi.kernels import weight_memory
from sakiyomi.kernels.weight_memory import PAGE, WeightMemory

SMAPS = Path("/proc/self/smaps")


def flags(address: int) -> list[str]:
    """Of the mapping that an address lies in, as the kernel names them."""
    within = False
    for line in SMAPS.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(found[1], 16) <= address < int(found[2], 16)
        elif within and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_tensors_do_not_share_numbers() -> None:
    memory = WeightMemory()
    shapes = [(3, 5), (0, 4), (700, 1000), (1,), (2, 1 << 20), (64, 64)]
    kinds = (torch.float32, torch.bfloat16, torch.int8)
    made = [
        memory.empty(shape, dtype).fill_(i) for i, (shape, dtype) in enumerate((s, k) for s in shapes for k in kinds)
    ]
    for i, tensor in enumerate(made):
        assert tensor.shape == shapes[i // 3]
        assert tensor.dtype == kinds[i % 3]
        assert tensor.is_contiguous()
        assert torch.all(tensor == i)
        assert not tensor.numel() or not tensor.data_ptr() % 64


@pytest.mark.thorough
@pytest.mark.skipif(not SMAPS.exists() or not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux's huge pages")
def test_large_tensors_lie_on_huge_pages_and_go() -> None:
    memory = WeightMemory()
    first, second = (memory.empty((4 * PAGE,), torch.uint8) for _ in range(2))
    assert not first.data_ptr() % PAGE
    place = second.data_ptr()
    assert "hg" in flags(first.data_ptr())
    assert "hg" in flags(place)
    del second, memory
    gc.collect()
    assert "hg" not in flags(place)
    assert torch.all(first.fill_(3) == 3)


def test_small_models_reserve_little(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, memory = list[int](), WeightMemory()
    real = weight_memory._piece

    def piece(size: int) -> Tensor | None:
        asked.append(size)
        return real(size)

    monkeypatch.setattr(weight_memory, "_piece", piece)
    for _ in range(100):
        memory.empty((64, 16), torch.float32)
    assert sum(asked) <= 2 * 100 * 64 * 16 * 4
    assert len(asked) < 10


def test_without_such_pages_memory_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    made = WeightMemory().empty((5, 7), torch.bfloat16)
    assert made.shape == (5, 7)
    assert made.untyped_storage().nbytes() == made.nbytes
