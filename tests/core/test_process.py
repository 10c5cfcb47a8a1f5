"""What all threads of a process share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from warm import warm


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_workers_end_when_they_are_released() -> None:
    """Else a second thread that computes would have them beside its own, and libgomp would let none of them spin."""
    code = """
import os, torch
from sakiyomi.core.process import release_workers
torch.set_num_threads(4)
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
numbers = torch.ones(1 << 20)
sums = [numbers.sum().item()]
with_workers = threads()
release_workers()
without = threads()
sums.append(numbers.sum().item())
print(with_workers - before, without - before, threads() - before, *sums)
"""
    said = subprocess.run([*warm(), "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=120).stdout
    assert said.split() == ["3", "0", "3", "1048576.0", "1048576.0"]
