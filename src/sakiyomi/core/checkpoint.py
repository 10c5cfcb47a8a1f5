"""Contents of a folder's weight files, read from their headers. No tensor is loaded; damage is found first.

A safetensors file is 8 bytes (length of the header, little endian), the header (JSON: name -> dtype, shape, place) and
the tensors' bytes. So the file's size follows from its header, and a download that broke off shows.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakiyomi.core.dtypes import STORED
from sakiyomi.core.errors import LoadError
from sakiyomi.core.memory import readable

HEADS_FILE = "medusa_lm_head.safetensors"  # of a folder that holds Medusa heads
RETAINING_FILE = "heads.safetensors"  # of one that holds retaining heads
GGUF_NOTE = "gguf.json"  # of one that was made of a GGUF file, which it names and which has the weights
MERGING_FILE = "convolutions.safetensors"  # of one that holds merging convolutions
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks?|layer)\.(\d{1,6})\.")
_LONGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Checkpoint:
    """Weights on disk.

    Attributes:
        files: the weight files, in order.
        elements: number of values by safetensors dtype ("BF16"); empty for pickle files, which are not opened.
        stored_bytes: bytes of all tensors as they are stored.
        layers: that the tensors' names count in the longest stack; 0: unknown.
    """

    files: tuple[Path, ...]
    elements: dict[str, int]
    stored_bytes: int
    layers: int = 0

    @property
    def parameters(self) -> int:
        """Number of values."""
        return sum(self.elements.values())

    @property
    def dtype(self) -> str | None:
        """Torch's name of the float dtype that most values have; None if there is none or it is unknown."""
        floats = {STORED[name]: count for name, count in self.elements.items() if name in _FLOATS}
        return max(floats, key=floats.__getitem__) if floats else None

    def bytes_as(self, itemsize: float) -> int:
        """Bytes when every ordinary float takes ``itemsize`` bytes and packed or integer values stay as stored."""
        if not self.elements:
            return self.stored_bytes
        bits = (count * (8 * itemsize if name in _FLOATS else _BITS[name]) for name, count in self.elements.items())
        return int(sum(bits) / 8)


@dataclass(frozen=True)
class Header:
    """Header of a safetensors file.

    Attributes:
        entries: dtype, shape and place (``data_offsets``) of each tensor, by name.
        metadata: of the file.
        start: where the tensors' bytes begin.
    """

    entries: dict[str, dict[str, Any]]
    metadata: dict[str, str]
    start: int


def read_checkpoint(folder: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Find the weight files of a model folder and check each against its header.

    Args:
        folder: in Hugging Face format.
        allow_pickle: accept ``pytorch_model.bin`` where there is no safetensors file.

    Raises:
        LoadError: no weights, pickle files only, a shard that is missing, a file that is cut off or damaged.
    """
    if (note := folder / GGUF_NOTE).is_file():
        from sakiyomi.core.gguf_files import pieces

        files = pieces(Path(read_json(note)["file"]))
        return Checkpoint(files, {}, sum(path.stat().st_size for path in files))
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _summary([(single, read_header(single).entries)])
    if index.is_file():
        return _read_shards(index)
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles and allow_pickle:
        return Checkpoint(tuple(pickles), {}, sum(path.stat().st_size for path in pickles))
    if pickles:
        raise LoadError(
            f"{folder} holds its weights as pickle ({pickles[0].name}), which can run any code when it is opened; "
            "use a safetensors version of the model, or pass allow_pickle=True if you trust where it came from"
        )
    others = sorted(path.name for path in folder.iterdir() if path.suffix in {".safetensors", ".gguf", ".pt", ".pth"})
    raise LoadError(
        f"no weights in {folder}: expected model.safetensors or model.safetensors.index.json with its shards"
        + (f", found {', '.join(others[:4])}" if others else "")
        + "; download the model again or save it with model.save_pretrained()"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        LoadError: the file cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read as JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds a JSON {type(value).__name__}, expected an object; download the file again")
    return value


def _read_shards(index: Path) -> Checkpoint:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
        raise LoadError(f"{index} has no weight_map from tensor names to files; download the file again")
    shards = sorted(set(names.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise LoadError(f"{index} names the file {shard!r} outside its own folder; get the model from its source")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise LoadError(
            f"{len(missing)} of the {len(shards)} weight files of {index.parent} are missing ({missing[0]}, ...); "
            "download them again"
        )
    headers = [(index.parent / shard, read_header(index.parent / shard).entries) for shard in shards]
    held = {name for _, header in headers for name in header}
    lost = [name for name in names if name not in held]
    if lost:
        raise LoadError(
            f"{index} lists {len(lost)} tensors that its files do not hold ({lost[0]}, ...): index and files do not "
            "belong together; download all of them again"
        )
    return _summary(headers)


def _summary(headers: list[tuple[Path, dict[str, Any]]]) -> Checkpoint:
    elements: dict[str, int] = {}
    stored = 0
    for _, header in headers:
        for entry in header.values():
            elements[entry["dtype"]] = elements.get(entry["dtype"], 0) + math.prod(entry["shape"])
            stored += entry["data_offsets"][1] - entry["data_offsets"][0]
    numbers = [int(found[1]) for _, header in headers for name in header if (found := LAYER.search(name))]
    return Checkpoint(tuple(path for path, _ in headers), elements, stored, 1 + max(numbers, default=-1))


def read_header(path: Path, remedy: str = "download it again") -> Header:
    """The header of a safetensors file, checked against the file's size; ``remedy``: what to do about damage.

    Raises:
        LoadError: the file cannot be read, is cut off or damaged.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) == 8 and length <= min(size - 8, _LONGEST_HEADER):
                text = file.read(length)
            elif start == b"version ":
                raise LoadError(f"{path} is only a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
            elif size < 8 or length <= _LONGEST_HEADER:
                raise LoadError(f"{path} is cut off: it ends inside its header ({size} bytes); {remedy}")
            else:
                raise _damaged(path, f"the header's length would be {length} bytes", remedy)
    except OSError as error:
        raise LoadError(f"{path} cannot be read ({error})") from error
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata that is no text")
        end = max((_end(entry) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header is no list of tensors: {error!r}", remedy) from error
    expected = 8 + length + end
    if size < expected:
        raise LoadError(
            f"{path} is cut off: it has {size} bytes ({readable(size)}) and its header describes {expected} "
            f"({readable(expected)}); {remedy}"
        )
    if size > expected:
        raise _damaged(path, f"{size - expected} bytes follow the last tensor", remedy)
    return Header(entries, metadata, 8 + length)


def _end(entry: dict[str, Any]) -> int:
    """Where a tensor's bytes end; raises where dtype, shape and place contradict each other."""
    begin, end = entry["data_offsets"]
    if (end - begin) * 8 != math.prod(entry["shape"]) * _BITS[entry["dtype"]]:
        raise ValueError(f"{entry['dtype']} {entry['shape']} does not take {end - begin} bytes")
    return int(end)


def _damaged(path: Path, reason: str, remedy: str) -> LoadError:
    return LoadError(f"{path} is no intact safetensors file ({reason}); {remedy}")
