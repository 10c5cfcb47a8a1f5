"""Digests of tensor files: a byte that changed since a file was written is found before it can change a text.

Our own safetensors files carry them in their metadata, under ``digest``: the XXH3 hash of every tensor, and one of the
table, which is everything else (names, dtypes, shapes, the other metadata, and the tensors' digests). It protects
against disks and transfers, not against an attacker, who would write new digests.

Files of other tools have none. They are called unverified once, and their digests are recorded beside them in
``<file>.digest.json``; as long as the file's size and time stay the same, its content must.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from sakiyomi.core.checkpoint import Header, read_header
from sakiyomi.core.dtypes import STORED, dtype_name
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.files import whole_file

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("sakiyomi")
ALIGNED = 64  # bytes
READERS = 4  # threads: more of them read a disk no faster
KEY = "digest"
"""Of a file's metadata."""


def data_digest(data: Any) -> str:
    """XXH3 of a buffer, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def file_digest(path: Path) -> str:
    """XXH3 of a whole file."""
    found = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while part := file.read(1 << 24):
            found.update(part)
    return found.hexdigest()


def json_digest(value: Any) -> str:
    """XXH3 of a JSON value; the order of its keys does not matter."""
    return data_digest(json.dumps(value, sort_keys=True).encode())


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary: files of token ids say by it which tokenizer they belong to.

    Raises:
        UnsupportedError: the tokenizer does not give its vocabulary.
    """
    if not hasattr(tokenizer, "get_vocab"):
        raise UnsupportedError(
            f"the tokenizer {type(tokenizer).__name__} does not give its vocabulary (get_vocab); a file of tokens "
            "needs a transformers tokenizer"
        )
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its digest in it."""
    return {**content, KEY: json_digest(content)}


def unsealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object without its digest; older versions wrote none.

    Raises:
        ValueError: the object was changed after it was sealed.
    """
    rest = {name: value for name, value in content.items() if name != KEY}
    if content.get(KEY) not in (None, json_digest(rest)):
        raise ValueError("it was changed after it was written")
    return rest


def tensor_digest(tensor: Tensor) -> str:
    """XXH3 of a tensor's bytes in contiguous order."""
    import torch

    return data_digest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def tensor_digests(tensors: Mapping[str, Tensor], done: Callable[[Tensor], object] | None = None) -> dict[str, str]:
    """Digests of many tensors by name, in several threads: hashing a mapped tensor reads it from disk.

    Args:
        tensors: by name.
        done: called with each of them when it was read, in these threads.
    """

    def digest(tensor: Tensor) -> str:
        found = tensor_digest(tensor)
        if done is not None:
            done(tensor)
        return found

    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


def _table(header: Header, digests: Mapping[str, str]) -> str:
    """Digest of all but the tensors themselves."""
    entries = {name: [entry["dtype"], entry["shape"]] for name, entry in header.entries.items()}
    return json_digest([entries, {k: v for k, v in header.metadata.items() if k != KEY}, dict(digests)])


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    done: Callable[[Tensor], object] | None = None,
) -> None:
    """Write a safetensors file with its digests. The caller makes the write atomic, see ``whole_file``.

    Equal content makes equal files, and tensors begin at multiples of 64 bytes: products of matrices that lie
    elsewhere, as they do in a mapped file, may be summed in another order.

    Args:
        path: to write to.
        tensors: by name.
        metadata: of the file.
        done: called with each tensor when it was read; once for its digest, and once for the file.
    """
    import torch

    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt"} | dict(metadata or {})  # transformers wants to know
    digests = tensor_digests(own, done)
    stored = {torchs: name for name, torchs in STORED.items()}
    entries = {name: {"dtype": stored[dtype_name(t.dtype)], "shape": list(t.shape)} for name, t in own.items()}
    table = _table(Header(entries, metadata, 0), digests)
    header: dict[str, Any] = {
        "__metadata__": dict(sorted({**metadata, KEY: json.dumps({"tensors": digests, "table": table})}.items()))
    }
    end, order = 0, sorted(own, key=lambda name: (own[name].nbytes % ALIGNED > 0, name))  # odd sizes at the end
    for name in order:
        start, end = end, end + own[name].nbytes
        header[name] = {**entries[name], "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(own[name].reshape(-1).view(torch.uint8).numpy().data)
            if done is not None:
                done(own[name])
    path.chmod(0o644)  # it may have been made private; they are there to be read by others


@dataclass(frozen=True)
class Digests:
    """The expected digests of a file's tensors.

    Attributes:
        path: of the file.
        header: of the file.
        tensors: digest of each; of a foreign file only of tensors that were read before.
        recorded: they are kept beside the file, not in it.
        remedy: what to do about damage.
    """

    path: Path
    header: Header
    tensors: Mapping[str, str]
    recorded: bool
    remedy: str

    @classmethod
    def of(cls, path: Path, remedy: str = "get it again") -> Digests:
        """Read them, and check the file's header.

        Raises:
            LoadError: the file is damaged.
        """
        header = read_header(path, remedy)
        if KEY not in header.metadata:
            return cls(path, header, _recorded(path), True, remedy)
        try:
            said = json.loads(header.metadata[KEY])
            tensors, table = dict(said["tensors"]), said["table"]
        except (ValueError, TypeError, KeyError):
            tensors, table = {}, None
        if tensors.keys() != header.entries.keys() or table != _table(header, tensors):
            raise LoadError(f"{path} is damaged: its header was changed after it was written; {remedy}")
        return cls(path, header, tensors, False, remedy)

    def check(self, name: str, found: str) -> None:
        """Compare a tensor's digest with what it has to be; of a foreign file only where it is known.

        Raises:
            LoadError: the tensor is another one.
        """
        if self.tensors.get(name, found) != found:
            since = "it was first read here" if self.recorded else "it was written"
            raise LoadError(f"{self.path} is damaged: tensor {name} was changed after {since}; {self.remedy}")

    def record(self, found: Mapping[str, str]) -> None:
        """Keep the digests of a foreign file's tensors beside it, and log that the file is unverified."""
        if not self.recorded or found.keys() <= self.tensors.keys():
            return
        place = _beside(self.path)
        content = {**_state(self.path), "tensors": {**self.tensors, **found}}
        try:
            with whole_file(place, "") as fresh:
                fresh.write_text(json.dumps(sealed(content), indent=1), encoding="utf-8")
        except LoadError as error:
            logger.info("%s has no digests, and none can be kept beside it (%s): it is unverified", self.path, error)
            return
        logger.info("%s has no digests: it is unverified; from now on %s says if it changes", self.path, place.name)


def load_tensors(
    path: Path, remedy: str = "get it again", *, wanted: Callable[[str], object] | None = None
) -> dict[str, Tensor]:
    """Tensors of a safetensors file, each compared with its digest; of a foreign file these are recorded.

    Args:
        path: of the file.
        remedy: what to do about damage, for messages.
        wanted: whether a tensor is read, by its name; None: all are.

    Raises:
        LoadError: the file cannot be read, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    digests = Digests.of(path, remedy)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in digests.header.entries if wanted is None or wanted(name)}
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path} cannot be read ({error}); {remedy}") from error
    known = tensor_digests(found)
    for name, digest in known.items():
        digests.check(name, digest)
    digests.record(known)
    return found


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.digest.json")


def _state(path: Path) -> dict[str, int]:
    """Size and time of a file; where they differ, the file was replaced."""
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _recorded(path: Path) -> dict[str, str]:
    """Digests that are kept beside a file; empty if they are damaged, or the file was replaced."""
    try:
        content = unsealed(json.loads(_beside(path).read_text(encoding="utf-8")))
        if all(content[name] == value for name, value in _state(path).items()):
            return dict(content["tensors"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return {}
