"""GGUF files (llama.cpp's format): metadata, and where the tensors lie. Nothing is loaded; damage is found first.

A file is "GGUF", a version, two counts, the metadata (name, type, value), the tensors (name, shape, type, place) and,
aligned, their bytes. Everything is little-endian. A model may be cut into pieces, each a whole file with a part of the
tensors; the first piece has the metadata. Described in ``docs/gguf.md`` of the project ggml.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.gguf_files import MAGIC, pieces

BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Types of tensors by their number: name, values a block, bytes a block."""
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
"""Names of tensors in layers."""
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_LEAST_ENTRY = 16  # bytes that a key or a tensor takes at least in the lists
_DEEPEST = 4  # arrays in arrays


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file.

    Attributes:
        name: as llama.cpp calls it.
        kind: name of its type (``BLOCKS``).
        shape: rows first, as torch has it; the file has it the other way around.
        path: the file.
        start, size: where its bytes are in the file, and how many.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    start: int
    size: int

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor as it is stored, mapped: (product of all dimensions but the last, bytes of a row).

        What is written to it does not reach the file: torch takes no arrays that cannot be written.
        """
        rows = math.prod(self.shape[:-1])
        shape = (rows, self.size // max(rows, 1))
        return np.memmap(self.path, dtype=np.uint8, mode="c", offset=self.start, shape=shape)


@dataclass(frozen=True)
class GgufFile:
    """A model in GGUF form.

    Attributes:
        paths: its file, or its pieces in order.
        metadata: values by key: numbers, texts, and lists of both (long lists of numbers as arrays of numpy); without
            lists of texts where they were not read.
        tensors: by name.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def layers(self) -> int:
        """Number of layers that tensors are named after."""
        return 1 + max((int(found[1]) for name in self.tensors if (found := LAYER.fullmatch(name))), default=-1)


def read_gguf(path: Path, *, vocabulary: bool = True) -> GgufFile:
    """Read the metadata and the list of tensors of a GGUF file, or of all pieces of a model of which it is one.

    Args:
        path: of the file.
        vocabulary: read lists of texts, too: tokens and merges, which take nearly all of the time and the memory.

    Raises:
        LoadError: it is damaged or cut off, is none, or a piece is missing.
        UnsupportedError: a version or byte order that is not read.
    """
    paths = pieces(path)
    files = [_Parser(each, vocabulary).parse() for each in paths]
    metadata = files[0].metadata
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise LoadError(f"{file.paths[0]} has the tensor {name!r} once more; download its model again")
            tensors[name] = tensor
    said = metadata.get("split.count", 1)
    if isinstance(said, int) and said not in (0, 1, len(paths)):  # files that were cut by hand keep no count
        raise LoadError(
            f"{path} is one of {said} pieces, and its name does not say which; give them the names that they had "
            f"(NAME-00001-of-{said:05}.gguf)"
        )
    return GgufFile(paths, metadata, tensors)


class _Parser:
    """Reads the head of one file. Every length is checked before memory is taken for it."""

    def __init__(self, path: Path, vocabulary: bool) -> None:
        self.path, self.vocabulary = path, vocabulary
        try:
            self.data: Any = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise LoadError(f"{path} cannot be read ({error})") from error
        self.view = memoryview(self.data)  # type: ignore[arg-type]
        self.place = 0

    def parse(self) -> GgufFile:
        start = bytes(self.view[:8])
        if start[:4] != MAGIC:
            if start.startswith(b"version "):
                raise LoadError(f"{self.path} is only a Git LFS pointer; run `git lfs pull` in its folder")
            raise LoadError(f"{self.path} does not begin as a GGUF file does; download it again")
        self.place = 4
        version = self.number("<I")
        if version not in (2, 3):
            if version in (2 << 24, 3 << 24):
                raise UnsupportedError(f"{self.path} is big-endian; use the file for little-endian machines")
            raise UnsupportedError(f"{self.path} has version {version} of the GGUF format; expected 2 or 3")
        tensors, keys = self.number("<Q"), self.number("<Q")
        self.check(tensors, _LEAST_ENTRY, "tensors")
        self.check(keys, _LEAST_ENTRY, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text("a key")
            if (value := self.value(key, self.number("<I"), 0)) is not None:
                metadata[key] = value
        listed = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            self.damaged(f"general.alignment is {alignment!r}")
        begin = -(-self.place // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in listed:
            block, width = BLOCKS[kind][1:]
            size = math.prod(shape) // block * width
            if offset % alignment or begin + offset + size > len(self.data):
                self.damaged(
                    f"the tensor {name!r} of {size} bytes would lie at {begin + offset} of {len(self.data)} bytes"
                )
            if name in found:
                self.damaged(f"the tensor {name!r} is there twice")
            found[name] = GgufTensor(name, BLOCKS[kind][0], shape, self.path, begin + offset, size)
        return GgufFile((self.path,), metadata, found)

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Name, type, shape and place of the next tensor."""
        name, count = self.text("the name of a tensor"), self.number("<I")
        if not 0 < count <= _MOST_DIMENSIONS:
            self.damaged(f"the tensor {name!r} would have {count} dimensions")
        shape = tuple(self.number("<Q") for _ in range(count))[::-1]
        kind, offset = self.number("<I"), self.number("<Q")
        if kind not in BLOCKS:
            raise UnsupportedError(
                f"{self.path} holds the tensor {name!r} in the type {kind}, which is not known here; use a file with "
                "another quantization (Q4_K_M, Q8_0)"
            )
        block = BLOCKS[kind][1]
        if shape[-1] % block or 0 in shape or math.prod(shape) > 8 * len(self.data) * block:
            self.damaged(f"the tensor {name!r} would be {BLOCKS[kind][0]} {list(shape)}")
        return name, kind, shape, offset

    def value(self, key: str, kind: int, depth: int) -> Any:
        """The value of a key, of this type; None: a list of texts that is not wanted."""
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            form = self.form(key, kind)
            value = np.frombuffer(self.take(form.itemsize, key), form)[0]
            return float(str(value)) if form == np.float32 else value.item()  # 1e-06 as somebody wrote it
        inner, count = self.number("<I"), self.number("<Q")
        if inner == _STRING:
            self.check(count, 8, f"texts of {key}")
            return self.texts(count, key) if self.vocabulary or depth else self.skip(count, key)
        if inner == _ARRAY:
            self.check(count, 12, f"lists of {key}")
            if depth == _DEEPEST:
                self.damaged(f"{key} is a list in more than {_DEEPEST} lists")
            return [self.value(key, inner, depth + 1) for _ in range(count)]
        form = self.form(key, inner)
        self.check(count, form.itemsize, f"values of {key}")
        return np.frombuffer(self.take(count * form.itemsize, key), form)

    def texts(self, count: int, key: str) -> list[str]:
        """So many texts; the loop over a vocabulary is the longest part of reading a head, and so holds no calls."""
        view, place, end = self.view, self.place, len(self.view)
        length_at = struct.Struct("<Q").unpack_from
        found: list[bytes] = []
        for _ in range(count):
            if place + 8 > end:
                self.cut(key)
            stop = place + 8 + length_at(view, place)[0]
            if stop > end:
                self.cut(key)
            found.append(view[place + 8 : stop].tobytes())
            place = stop
        self.place = place
        return [each.decode("utf-8", "replace") for each in found]

    def skip(self, count: int, key: str) -> None:
        """Go past so many texts."""
        view, place, last = self.view, self.place, len(self.view) - 8
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if place > last:
                self.cut(key)
            place += 8 + length_at(view, place)[0]
        if place > len(view):
            self.cut(key)
        self.place = place

    def form(self, key: str, kind: int) -> np.dtype[Any]:
        """Form of a number of this type."""
        if kind not in _NUMBERS:
            self.damaged(f"{key} has the type {kind}")
        return np.dtype(_NUMBERS[kind])

    def text(self, what: str) -> str:
        """The next text."""
        return bytes(self.take(self.number("<Q"), what)).decode("utf-8", "replace")

    def number(self, form: str) -> int:
        """The next number."""
        return int(struct.unpack(form, self.take(struct.calcsize(form), "a number"))[0])

    def take(self, size: int, what: str) -> memoryview:
        """The next bytes."""
        if self.place + size > len(self.view):
            self.cut(what)
        self.place += size
        return self.view[self.place - size : self.place]

    def check(self, count: int, least: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold."""
        if count * least > len(self.view) - self.place:
            self.damaged(f"it would hold {count} {what} in {len(self.view)} bytes")

    def cut(self, what: str) -> NoReturn:
        self.damaged(f"it is cut off: it ends inside {what}, at {len(self.view)} bytes")

    def damaged(self, reason: str) -> NoReturn:
        raise LoadError(f"{self.path} is no intact GGUF file ({reason}); download it again")
