"""Memory for packed weights: a few large pieces on huge pages, if the system has them; or mapped files.

A decoding pass reads all weights once. On pages of 4 KiB a core waits for addresses; on huge pages it reads a fifth
more in the same time (benchmarks/log/passes-cpu.md). ``madvise`` asks for huge pages, as most systems require.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.memory import readable

PAGE = 2 << 20  # of a huge page on x86 and, with pages of 4 KiB, on ARM
MOST = 64 << 20  # bytes of a piece for several tensors
ALIGNED = 64  # a line of the cache
AROUND = 64 << 10  # Linux maps the pages of a file around one that is read, up to this border; a multiple of a page


class WeightMemory:
    """Hands out tensors that are freed with the last one of their piece.

    Pieces grow with the memory in use, so that a small model reserves little; pages that are not written take none.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)  # the rest of the last one
        self._given = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor as ``torch.empty`` gives it."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // ALIGNED) * ALIGNED
        if not size:
            return torch.empty(shape, dtype=dtype)
        if room > len(self._piece):
            found = _piece(max(room, min(self._given, MOST)))
            if found is None:
                return torch.empty(shape, dtype=dtype)
            self._piece = found
        self._given += room
        made, self._piece = self._piece[:size], self._piece[room:]
        return made.view(dtype).view(*shape)


def _piece(size: int) -> Tensor | None:
    """At least so many bytes, from the border of a huge page on; None: there are no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        held = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(held, dtype=torch.uint8)
        skipped = -whole.data_ptr() % PAGE
        held.madvise(mmap.MADV_HUGEPAGE, skipped, len(whole) - skipped)
    except OSError:  # no memory, which torch reports better, or a system without huge pages
        return None
    return whole[skipped:]


class _Mapping(NamedTuple):
    """A part of a file in memory: the address of its first byte, the pages, the file, and the part's offset there."""

    address: int
    pages: mmap.mmap
    file: IO[bytes]
    offset: int


class Place(NamedTuple):
    """Where a tensor lies in a file."""

    file: IO[bytes]
    offset: int
    size: int


class MappedMemory:
    """Packed weights in mapped files: their pages can be dropped from memory, and come back from the file when read.

    Args:
        folder: of a new file without a name, in which ``empty`` makes tensors. It is gone with the last of them, or
            with the process. None: there is none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file: IO[bytes] | None = None
        self._open: list[IO[bytes]] = []  # as long as this lives
        weakref.finalize(self, _close, self._open)
        if folder is not None:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            self._open.append(self._file)
        self._size = 0
        self._mappings: list[_Mapping] = []  # by address
        self._given: Tensor | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in the new file. The one before it is taken to be written, and is dropped.

        Raises:
            MemoryLimitError: the disk is full.
        """
        assert self._file is not None
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        if self._given is not None:
            self.drop(self._given)
        room = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            if hasattr(os, "posix_fallocate"):  # writing to space that is not reserved would end the process
                os.posix_fallocate(self._file.fileno(), self._size, room)
            else:
                os.truncate(self._file.fileno(), self._size + room)
        except OSError as error:
            raise MemoryLimitError(
                f"{readable(room)} more of packed weights do not fit on the disk ({error.strerror}); free some space, "
                "or pass another folder as offload"
            ) from error
        pages = mmap.mmap(self._file.fileno(), room, offset=self._size)
        whole = self.hold(self._file, pages, self._size)
        self._size += room
        self._given = whole[:size].view(dtype).view(*shape)
        return self._given

    def hold(self, file: IO[bytes], pages: mmap.mmap, offset: int = 0) -> Tensor:
        """All bytes of a mapping of a file, uint8 (n): tensors among them can be dropped. The file is closed later."""
        if file is not self._file:
            self._open.append(file)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        bisect.insort(self._mappings, _Mapping(whole.data_ptr(), pages, file, offset), key=lambda each: each.address)
        return whole

    def place(self, tensor: Tensor) -> Place | None:
        """Where a tensor lies; None: not in these files."""
        found = self._find(tensor)
        if found is None:
            return None
        mapping, start = found
        return Place(mapping.file, mapping.offset + start, tensor.nbytes)

    def drop(self, tensor: Tensor) -> None:
        """Drop a tensor's pages from memory, and what was mapped around them. Tensors that lie elsewhere stay."""
        found = self._find(tensor)
        if found is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping, start = found
            first, last = start - start % AROUND, -(-(start + tensor.nbytes) // AROUND) * AROUND
            mapping.pages.madvise(mmap.MADV_DONTNEED, first, min(last, len(mapping.pages)) - first)

    def _find(self, tensor: Tensor) -> tuple[_Mapping, int] | None:
        """The mapping that a tensor lies in, and its offset there."""
        address = tensor.data_ptr()
        place = bisect.bisect(self._mappings, address, key=lambda each: each.address) - 1
        if place < 0 or not tensor.nbytes:
            return None
        mapping = self._mappings[place]
        start = address - mapping.address
        return (mapping, start) if start + tensor.nbytes <= len(mapping.pages) else None


def _close(files: list[IO[bytes]]) -> None:
    for file in files:
        file.close()
