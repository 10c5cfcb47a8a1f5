"""Model files of CTranslate2 (``model.bin``): variables by name.

A file is a version (6), the name and revision of the kind of model, the variables (name, shape, type, bytes), and
aliases (name, name of the variable). Everything is little-endian; a name is its length with a zero byte, and the bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sakiyomi.core.byte_reader import ByteReader
from sakiyomi.core.errors import LoadError, UnsupportedError

_VERSION = 6
_TYPES = ("<f4", "<i1", "<i2", "<i4", "<f2", "<u2")  # the last one is bfloat16's bits
_BFLOAT16 = 5
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Ct2File:
    """A model file.

    Attributes:
        path: of the file.
        kind: name of the kind of model, for instance "WhisperSpec".
        revision: of the kind's layout.
        variables: numbers by name, mapped; bfloat16 as float32.
    """

    path: Path
    kind: str
    revision: int
    variables: dict[str, NDArray[Any]]

    def stored(self, name: str) -> NDArray[Any]:
        """A variable as it is stored, of a quantized one the codes.

        Raises:
            LoadError: there is none of the name.
        """
        if name not in self.variables:
            raise LoadError(f"{self.path} has no variable {name!r}; convert the model again")
        return self.variables[name]

    def value(self, name: str) -> NDArray[Any]:
        """A variable; of a quantized one (int8 by row, int16 as a whole) the numbers that it stands for, in float32.

        Raises:
            LoadError: there is none of the name.
        """
        found, scale = self.stored(name), self.variables.get(f"{name}_scale")
        if scale is None:
            return found
        whole = found.astype(np.float32)
        whole /= scale.reshape(-1, *[1] * (found.ndim - 1) if scale.ndim else ())
        return whole


def read_ct2(path: Path) -> Ct2File:
    """Map a model file.

    Raises:
        LoadError: it cannot be read, is damaged, or is another kind of file.
        UnsupportedError: its version is not read.
    """
    return _Parser(path, "model file of CTranslate2").parse()


class _Parser(ByteReader):
    def parse(self) -> Ct2File:
        version = self.number("<I")
        if version != _VERSION:
            raise UnsupportedError(
                f"{self.path} has version {version} of CTranslate2's format; expected {_VERSION}: convert the model "
                "again with ctranslate2 3 or 4"
            )
        kind, revision = self.name(), self.number("<I")
        variables = dict(self.variable() for _ in range(self.number("<I")))
        for _ in range(self.number("<I")):
            alias, name = self.name(), self.name()
            if name not in variables:
                self.damaged(f"{alias!r} stands for {name!r}, which is not there")
            variables[alias] = variables[name]
        return Ct2File(self.path, kind, revision, variables)

    def variable(self) -> tuple[str, NDArray[Any]]:
        name, rank = self.name(), self.number("<B")
        if rank > _MOST_DIMENSIONS:
            self.damaged(f"{name!r} would have {rank} dimensions")
        shape = [self.number("<I") for _ in range(rank)]
        kind, size = self.number("<B"), self.number("<I")
        if kind >= len(_TYPES):
            self.damaged(f"{name!r} has the type {kind}, which is none")
        form = np.dtype(_TYPES[kind])
        if math.prod(shape) * form.itemsize != size:
            self.damaged(f"{name!r} of the shape {shape} has {size} bytes")
        values = self.take(size).view(form).reshape(shape)
        if kind == _BFLOAT16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return name, values

    def name(self) -> str:
        return self.text(self.number("<H")).rstrip("\0")
