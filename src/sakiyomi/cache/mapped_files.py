"""Storage for keys and values in mapped files: the system moves pages to disk when memory is short.

A tensor of a mapped file is read and written like any other, also by kernels. Unused pages are written to the file when
memory is short, and are loaded again when they are read. Files have no name, so they disappear with their tensors or
with the process, however it ends.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError, MemoryLimitError, UnsupportedError
from sakiyomi.core.memory import readable

logger = logging.getLogger("sakiyomi")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class MappedFiles:
    """Where the files lie.

    Attributes:
        file: their folder; empty: where temporary files lie.
    """

    file: str = ""

    @property
    def folder(self) -> Path:
        """The folder that is meant."""
        return Path(self.file or tempfile.gettempdir()).expanduser()

    def prepare(self) -> None:
        """Try the folder out.

        Raises:
            InputError: it is none, or takes no file.
            UnsupportedError: the system does not reserve space for files.
        """
        if not hasattr(os, "posix_fallocate"):
            raise UnsupportedError(
                "cache='offload': this system does not reserve space for files, without which a full disk would end "
                "the process; use cache='quant-4', or a policy"
            )
        self.allocate((1,), dtype=torch.uint8)
        kind = _file_system(self.folder)
        if kind in _IN_MEMORY:
            logger.warning(
                "the folder of cache='offload', %s, lies in memory itself (%s): nothing is saved there; name one on a "
                "disk, as cache='offload:FOLDER'",
                self.folder,
                kind,
            )

    def available(self) -> int:
        """Bytes that are free on the disk."""
        return shutil.disk_usage(self.folder).free

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Zeros, as of ``torch.zeros``, in a file of their own that is gone with them.

        Args:
            size: of the tensor.
            dtype: of its numbers.
            device: the CPU.

        Raises:
            MemoryLimitError: the disk is full.
            InputError: no file can be made there.
        """
        assert torch.device(device).type == "cpu"
        numbers = math.prod(size)
        count = numbers * dtype.itemsize
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix="sakiyomi-") as file:
                # Without reserved space a full disk would end the process later.
                os.posix_fallocate(file.fileno(), 0, count)
                return torch.from_file(file.name, shared=True, size=numbers, dtype=dtype).view(*size)
        except OSError as error:
            if error.errno in _FULL:
                raise MemoryLimitError(
                    f"keys and values of {readable(count)} more do not fit in {self.folder}, where "
                    f"{readable(self.available())} are free ({error.strerror}); name a folder on a larger disk, "
                    "shorten the prompt, or lower max_new_tokens or max_batch"
                ) from error
            raise InputError(
                f"cache='offload' cannot keep files in {self.folder} ({error.strerror}); expected a folder on a disk, "
                "as cache='offload:FOLDER'"
            ) from error


def _file_system(folder: Path) -> str | None:
    """What kind of file system a folder is on; None: not known."""
    import psutil

    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    place = folder.resolve()
    return next((kinds[str(above)] for above in (place, *place.parents) if str(above) in kinds), None)
