"""The texts of earlier requests in one file: read when a drafter is made, written when requests end.

    8 bytes    magic
    a line     format version, and the checksum of all that follows
    a line     JSON: the tokenizer's digest, length and time of each document
    tokens     of all documents one after the other, the oldest first, 4 bytes each, little-endian

A file is never half-written: it is written under another name and then moved. Several processes may share one: each
adds its documents to those that are there at that moment. Only its owner may read it: it holds prompts and answers.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import whole_file

__all__ = ["LIMIT", "Document", "MemoryFile", "read_memory"]

MAGIC = b"SAKIMEM\n"
FORMAT = 1
_INTEGERS = "<u4"
LIMIT = 1 << 19  # bytes of tokens: 131072 of them, about half a second of reading


@dataclass(frozen=True)
class Document:
    """One request: its prompt and what was written.

    Attributes:
        tokens: of both.
        time: of its end, seconds since 1970.
    """

    tokens: tuple[int, ...]
    time: float


@dataclass
class Contents:
    """What a memory file holds.

    Attributes:
        tokenizer: digest of the tokenizer that the tokens are of.
        documents: the oldest first.
    """

    tokenizer: str
    documents: list[Document] = field(default_factory=list)


def read_memory(path: Path) -> Contents:
    """Read and check a memory file.

    Raises:
        LoadError: it cannot be read, is no memory file, is of another format version, or is damaged.
    """
    remedy = f"`sakiyomi memory clear {path}` removes it"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LoadError(f"the memory file {path} cannot be read: {error.strerror}") from None
    if not data.startswith(MAGIC):
        raise LoadError(f"{path} is no memory file of sakiyomi; give another name")
    line, _, rest = data[len(MAGIC) :].partition(b"\n")
    version, _, checksum = line.decode("ascii", "replace").partition(" ")
    if version != str(FORMAT):
        raise LoadError(f"the memory file {path} has format {version!r:.20}, this version reads {FORMAT}; {remedy}")
    if checksum != f"{zlib.crc32(rest):08x}":
        raise LoadError(f"the memory file {path} is damaged: its checksum is another one; {remedy}")
    line, _, body = rest.partition(b"\n")
    header = json.loads(line)
    tokens, documents, place = np.frombuffer(body, _INTEGERS).tolist(), [], 0
    for length, when in zip(header["lengths"], header["times"], strict=True):
        documents.append(Document(tuple(tokens[place : place + length]), when))
        place += length
    return Contents(header["tokenizer"], documents)


class MemoryFile:
    """A memory file that a drafter reads and adds to.

    Args:
        path: of the file, which is made when there is something to write.
        tokenizer: digest of the target's.
        vocab_size: of the target.
        limit: bytes of tokens; the oldest documents go when there would be more.

    Attributes:
        documents: what the file held when it was last read or written, the oldest first.
        most: tokens that it may hold.

    Raises:
        LoadError: see ``read_memory``; or it is another tokenizer's, or its folder is not there.
    """

    def __init__(self, path: str | Path, tokenizer: str, vocab_size: int, limit: int = LIMIT) -> None:
        self.path = Path(path).expanduser()
        if not self.path.parent.is_dir():
            raise LoadError(
                f"the memory file {self.path} cannot be kept: there is no folder {self.path.parent}; check the "
                "path, or make the folder"
            )
        self._tokenizer, self._vocab_size, self.most = tokenizer, vocab_size, limit // 4
        self.documents: list[Document] = self._read()
        self._pending: list[Document] = []

    def add(self, tokens: Sequence[int]) -> bool:
        """Add a document, which ``save`` writes; of a long one the end. Returns whether it is new."""
        document = Document(tuple(tokens[-self.most :]), time.time())
        new = all(document.tokens != other.tokens for other in (*self.documents, *self._pending))
        self._pending.append(document)
        return new

    def save(self) -> None:
        """Write what was added, after the documents that are in the file now.

        Raises:
            LoadError: the file was damaged meanwhile, or cannot be written; what was added is forgotten.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        try:
            with _alone(self.path.parent):
                merged = {document.tokens: document for document in self._read()}
                for document in pending:
                    merged.pop(document.tokens, None)  # one that comes again is the newest
                    merged[document.tokens] = document
                self.documents = self._newest(list(merged.values()))
                self._write()
        except OSError as error:
            raise LoadError(f"the memory file {self.path} cannot be written: {error.strerror or error}") from error

    def _read(self) -> list[Document]:
        if not self.path.exists():
            return []
        found = read_memory(self.path)
        if found.tokenizer != self._tokenizer:
            raise LoadError(
                f"the memory file {self.path} is of another tokenizer ({found.tokenizer[:12]}, the target's is "
                f"{self._tokenizer[:12]}): its tokens would mean other words; give each tokenizer a file of its own"
            )
        if any(max(document.tokens, default=0) >= self._vocab_size for document in found.documents):
            raise LoadError(
                f"the memory file {self.path} holds tokens that the target does not know, which has "
                f"{self._vocab_size}; give it a file of its own"
            )
        return found.documents

    def _newest(self, documents: list[Document]) -> list[Document]:
        size = sum(len(document.tokens) for document in documents)
        while size > self.most:
            size -= len(documents.pop(0).tokens)
        return documents

    def _write(self) -> None:
        documents = self.documents
        body = np.array([token for document in documents for token in document.tokens], _INTEGERS).tobytes()
        header = {
            "format": FORMAT,
            "tokenizer": self._tokenizer,
            "lengths": [len(document.tokens) for document in documents],
            "times": [document.time for document in documents],
        }
        rest = json.dumps(header).encode() + b"\n" + body
        with whole_file(self.path, "name another file", private=True) as fresh:
            fresh.write_bytes(MAGIC + f"{FORMAT} {zlib.crc32(rest):08x}\n".encode() + rest)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes that write a memory file there, where the system has such locks."""
    handle = None
    with suppress(ImportError, OSError):
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
