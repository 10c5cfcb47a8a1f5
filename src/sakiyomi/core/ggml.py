"""Model files of whisper.cpp (``ggml-*.bin``): sizes, tokens, and where the tensors lie.

A file is the number 0x67676d6c ("ggml"), eleven sizes, the mel filters, the tokens of text in order (length, bytes),
and up to its end the tensors (dimensions, length of the name, type, shape, name, bytes). Everything is little-endian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sakiyomi.core.byte_reader import ByteReader
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.gguf import BLOCKS, GgufTensor

_MAGIC = b"lmgg"
_SIZES = (
    "vocab", "audio_ctx", "audio_state", "audio_head", "audio_layer", "text_ctx", "text_state", "text_head",
    "text_layer", "mels", "ftype",
)  # fmt: skip
_BINS = 201  # of a spectrum of 400 samples
_VERSION = 2
"""Of the quantized types, the same as in GGUF files; older ones are other blocks under the same numbers."""
_MOST_DIMENSIONS, _MOST_LAYERS = 4, 1000


@dataclass(frozen=True)
class GgmlFile:
    """A Whisper model of whisper.cpp.

    Attributes:
        path: of the file.
        sizes: by the names that whisper.cpp has for them, without "n_".
        tokens: bytes of each; tokens without a text of their own may be missing at the end.
        tensors: by OpenAI's names.
    """

    path: Path
    sizes: dict[str, int]
    tokens: list[bytes]
    tensors: dict[str, GgufTensor]


def read_ggml(path: Path) -> GgmlFile:
    """Read a file's head, and where its tensors lie.

    Raises:
        LoadError: it cannot be read, is damaged, or is another kind of file.
        UnsupportedError: it holds another kind of model, or a type of tensors that is not known.
    """
    return _Parser(path, "model file of whisper.cpp").parse()


def _are_whispers(sizes: dict[str, int], filters: tuple[int, ...]) -> bool:
    """Whether these can be sizes of a Whisper model: other models' files begin with the same number."""
    whole = min(sizes[name] for name in _SIZES[:-1]) > 0 and sizes["ftype"] >= 0
    if not whole or max(sizes["audio_layer"], sizes["text_layer"]) > _MOST_LAYERS:
        return False
    width = sizes["audio_state"]
    heads = width % sizes["audio_head"] == width % sizes["text_head"] == 0
    return width == sizes["text_state"] and heads and filters == (sizes["mels"], _BINS)


class _Parser(ByteReader):
    def parse(self) -> GgmlFile:
        magic = bytes(self.take(4))
        if magic != _MAGIC:
            self.damaged(f"it begins with {magic!r}, and such files with {_MAGIC!r}")
        sizes = dict(zip(_SIZES, self.numbers("<11i"), strict=True))
        filters = self.numbers("<2i")
        if not _are_whispers(sizes, filters):
            raise UnsupportedError(f"{self.path} is a ggml file of another kind of model; expected Whisper")
        self.take(4 * math.prod(filters))
        tokens = [bytes(self.take(self.number("<i"))) for _ in range(self.number("<i"))]
        version, tensors = sizes["ftype"] // 1000, {}
        while self.place < len(self.data):
            tensor = self.tensor()
            if tensor.name in tensors:
                self.damaged(f"the tensor {tensor.name!r} is there twice")
            if version != _VERSION and tensor.kind.startswith(("Q", "IQ")):
                raise UnsupportedError(
                    f"{self.path} has version {version} of the quantized types; expected {_VERSION}: quantize the "
                    "model again with whisper.cpp 1.4 or later"
                )
            tensors[tensor.name] = tensor
        return GgmlFile(self.path, sizes, tokens, tensors)

    def tensor(self) -> GgufTensor:
        count, length, kind = self.numbers("<3i")
        if not 0 < count <= _MOST_DIMENSIONS:
            self.damaged(f"a tensor would have {count} dimensions")
        shape = self.numbers(f"<{count}i")[::-1]
        name = self.text(length)
        if kind not in BLOCKS:
            raise UnsupportedError(f"{self.path} holds {name!r} in the type {kind}, which is not known here")
        label, block, width = BLOCKS[kind]
        if min(shape) < 1 or shape[-1] % block:
            self.damaged(f"{name!r} would be {label} {list(shape)}")
        start, size = self.place, math.prod(shape) // block * width
        self.take(size)
        return GgufTensor(name, label, shape, self.path, start, size)
