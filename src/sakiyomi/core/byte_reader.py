"""Binary files read from front to back. Every length is checked before it is used."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from sakiyomi.core.errors import LoadError


class ByteReader:
    """A mapped file, and a place in it.

    Args:
        path: of the file.
        kind: what it should be, for errors: "model file of CTranslate2".

    Raises:
        LoadError: it cannot be read.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind, self.place = path, kind, 0
        try:
            self.data: NDArray[Any] = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise LoadError(f"{path} cannot be read ({error.strerror}); check the path") from None

    def take(self, size: int) -> NDArray[np.uint8]:
        """The next bytes.

        Raises:
            LoadError: the file ends before.
        """
        if not 0 <= size <= len(self.data) - self.place:
            self.damaged("it ends too early")
        self.place += size
        return self.data[self.place - size : self.place]

    def numbers(self, form: str) -> tuple[int, ...]:
        """The next numbers, as ``struct`` writes them."""
        return struct.unpack(form, bytes(self.take(struct.calcsize(form))))

    def number(self, form: str) -> int:
        """The next number."""
        return self.numbers(form)[0]

    def text(self, length: int) -> str:
        """The next text, of so many bytes in UTF-8."""
        try:
            return bytes(self.take(length)).decode()
        except UnicodeDecodeError:
            self.damaged("a name is no text")

    def damaged(self, why: str) -> NoReturn:
        """Raise a ``LoadError``."""
        raise LoadError(f"{self.path} is no {self.kind}, or damaged ({why}); download it again")
