"""What was computed for rows of token ids, kept on disk for the epochs in which they come again."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("sakiyomi")


def row_keys(ids: Tensor) -> list[bytes]:
    """A short name of each row of (B, T) ids."""
    return [hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=16).digest() for row in ids]


def chunks(ids: Tensor, most: int) -> Sequence[Tensor]:
    """Rows of (B, T) ids in passes of one shape, ``most`` rows; the last is filled up with zeros."""
    filled = torch.cat([ids, ids.new_zeros(-len(ids) % most, ids.shape[1])])
    return list(torch.split(filled, most))


class KeptRows:
    """Tensors of rows in one file, which the system deletes with the process. Memory beyond the page cache is not used.

    Args:
        folder: holds the file.
        limit_bytes: of the file; 0: no file, and nothing is kept. If the disk is full earlier, what fits is kept.
        dtype: of the numbers there; None: their own.
    """

    def __init__(self, folder: Path, limit_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._file = tempfile.TemporaryFile(dir=folder) if limit_bytes else None  # noqa: SIM115
        self._limit, self._end = limit_bytes, 0
        self._places: dict[bytes, tuple[int, list[tuple[torch.dtype, torch.Size]]]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def get(self, ids: Tensor, compute: Callable[[Tensor], Sequence[Tensor]], passed: int) -> tuple[list[Tensor], int]:
        """What belongs to each of (B, T) ids.

        Args:
            ids: whose rows may have come before.
            compute: makes the tensors of (N, T) rows that are not kept, each with the N rows in front.
            passed: rows of a call (N). All calls have one shape, filled up with zeros: what belongs to a row does not
                depend on the rows beside it, nor on when a run was resumed.

        Returns:
            The tensors, each with the B rows in front, and the number of rows that were computed.
        """
        keys = row_keys(ids)
        missing = [index for index, key in enumerate(keys) if key not in self._places]
        fresh: dict[int, Sequence[Tensor]] = {}
        for rows in chunks(ids[missing], passed) if missing else ():
            for index, row in zip(missing[len(fresh) :], zip(*compute(rows), strict=True), strict=False):
                fresh[index] = row
                self.keep(keys[index], row)
        found = [fresh[index] if index in fresh else self.read(key) for index, key in enumerate(keys)]
        # Types and devices may be mixed: kept rows are in the main memory.
        parts = [[part.to(ids.device) for part in row] for row in zip(*found, strict=True)]
        return [torch.stack(part) for part in parts], len(missing)

    def keep(self, key: bytes, tensors: Sequence[Tensor]) -> None:
        """Store the tensors of a row, unless there is no room left."""
        if self._file is None or key in self._places:
            return
        tensors = [tensor.to(self._dtype or tensor.dtype) for tensor in tensors]
        content = b"".join(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors
        )
        if self._end + len(content) > self._limit:
            return
        try:
            written = os.pwrite(self._file.fileno(), content, self._end)
        except OSError as error:
            logger.warning("rows are kept no further (%s); the others are computed each time", error.strerror)
            self._limit = 0
            return
        if written == len(content):
            self._places[key] = self._end, [(tensor.dtype, tensor.shape) for tensor in tensors]
            self._end += written

    def read(self, key: bytes) -> list[Tensor]:
        """The tensors of a row that is kept."""
        assert self._file is not None
        place, forms = self._places[key]
        sizes = [shape.numel() * dtype.itemsize for dtype, shape in forms]
        content = torch.frombuffer(bytearray(os.pread(self._file.fileno(), sum(sizes), place)), dtype=torch.uint8)
        parts = content.split(sizes)
        # clone: a type's numbers must begin at a multiple of their size
        return [part.clone().view(dtype).view(shape) for part, (dtype, shape) in zip(parts, forms, strict=True)]

    def close(self) -> None:
        """Give the disk space back."""
        if self._file is not None:
            self._file.close()
        self._file, self._places = None, {}
