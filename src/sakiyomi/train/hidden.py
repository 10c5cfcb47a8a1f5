"""Hidden states of a frozen target for rows of token ids: computed without gradient, and kept on disk if wanted."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.train.labels import chunks, row_keys

__all__ = ["HiddenStates"]

logger = logging.getLogger("sakiyomi")


class HiddenStates:
    """What heads read of rows that may come again.

    Args:
        backbone: the target.
        folder: for a file of what is kept; it goes with the process.
        limit_bytes: of that file; 0: none is made. Where the disk is full before, what fits is kept.

    Attributes:
        computed, found: rows so far, by the target and on disk.
        calls: of each call the rows that were computed, and the seconds of that.
    """

    def __init__(self, backbone: Backbone, folder: Path, limit_bytes: int = 0) -> None:
        self._backbone, self._limit = backbone, limit_bytes
        # It goes with the process, however that ends.
        self._file = tempfile.TemporaryFile(dir=folder) if limit_bytes else None  # noqa: SIM115
        self._places: dict[bytes, int] = {}
        self.computed = self.found = 0
        self.calls: list[tuple[int, float]] = []

    def __call__(self, ids: Tensor) -> Tensor:
        """(B, T) ids to (B, T, hidden), on the device of the ids."""
        if self._file is None:
            return self._compute(ids)
        keys = row_keys(ids)
        missing = [index for index, key in enumerate(keys) if key not in self._places]
        fresh = self._compute(ids[missing]) if missing else None
        self.found += len(ids) - len(missing)
        rows: list[Tensor | None] = [None] * len(ids)
        if fresh is not None:
            for index, row in zip(missing, fresh, strict=True):
                rows[index] = row
                self._keep(keys[index], row)
        like = fresh[0] if fresh is not None else None
        return torch.stack([row if row is not None else self._read(keys[i], ids, like) for i, row in enumerate(rows)])

    def close(self) -> None:
        """Give the disk space back."""
        if self._file is not None:
            self._file.close()
        self._file, self._places = None, {}

    def _compute(self, ids: Tensor) -> Tensor:
        began = time.perf_counter()
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            hidden = torch.cat([self._backbone(rows) for rows in chunks(ids)])[: len(ids)]
        if hidden.device.type == "cuda":
            torch.cuda.synchronize(hidden.device)
        self.computed += len(ids)
        self.calls.append((len(ids), time.perf_counter() - began))
        return hidden

    def _keep(self, key: bytes, row: Tensor) -> None:
        size = row.numel() * 2
        if self._file is None or key in self._places or (len(self._places) + 1) * size > self._limit:
            return
        content = row.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
        place = len(self._places) * size
        try:
            written = os.pwrite(self._file.fileno(), content, place)
        except OSError as error:
            logger.warning("hidden states are kept no further (%s); the others are computed each time", error.strerror)
            self._limit = 0
            return
        if written == size:
            self._places[key] = place

    def _read(self, key: bytes, ids: Tensor, like: Tensor | None) -> Tensor:
        assert self._file is not None
        width = int(self._backbone.weight.shape[1])
        content = bytearray(os.pread(self._file.fileno(), ids.shape[1] * width * 2, self._places[key]))
        row = torch.frombuffer(content, dtype=torch.int16).view(torch.bfloat16).view(ids.shape[1], width)
        dtype = like.dtype if like is not None else self._backbone.weight.dtype
        return row.to(ids.device, dtype)
