"""Damage to files: one byte, a block, or the end.

``SAKIYOMI_DAMAGES`` is the number of damages of each format; the figures of benchmarks/log/exactness.md are of 1000.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from sakiyomi.core.errors import SakiyomiError

__all__ = ["DAMAGES", "damaged", "refusals"]

DAMAGES = int(os.environ.get("SAKIYOMI_DAMAGES", "40"))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The content with one byte, a block or the end changed; never the same."""
    changed, size = bytearray(data), len(data)
    match rng.choice(["flip", "byte", "zero", "noise", "cut", "swap", "longer", "empty"]):
        case "flip":
            changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
        case "byte":
            changed[rng.randrange(size)] = rng.randrange(256)
        case "zero" | "noise" as kind:
            length = min(size, rng.choice([16, 256, 4096, 65536]))
            first = rng.randrange(size - length + 1)
            changed[first : first + length] = bytes(length) if kind == "zero" else rng.randbytes(length)
        case "cut":
            del changed[rng.randrange(size) :]
        case "swap":
            length = min(size // 2, rng.choice([8, 64, 4096]))
            first, second = rng.randrange(size - length + 1), rng.randrange(size - length + 1)
            one, other = data[first : first + length], data[second : second + length]
            changed[first : first + length], changed[second : second + length] = other, one
        case "longer":
            changed += rng.randbytes(rng.choice([1, 64, 4096]))
        case "empty":
            changed.clear()
    return bytes(changed) if bytes(changed) != data else damaged(data, rng)


def _damaged_head(data: bytes, rng: random.Random) -> bytes:
    """The same, most often where formats have their names and sizes."""
    head = 4000
    return damaged(data[:head], rng) + data[head:] if rng.random() < 0.6 and len(data) > head else damaged(data, rng)


def refusals(files: Sequence[Path], count: int, read: Callable[[], object]) -> int:
    """How many damages of files, by turns, were refused; each in one line of ours, or it was read."""
    rng, refused = random.Random(0), 0
    for number in range(count):
        path = files[number % len(files)]
        whole = path.read_bytes()
        path.write_bytes(_damaged_head(whole, rng))
        try:
            read()
        except SakiyomiError as error:
            assert "\n" not in error.message
            refused += 1
        path.write_bytes(whole)
    return refused
