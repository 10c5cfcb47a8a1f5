"""A file with the texts of earlier requests: read when a drafter is made, written when requests end.

Its line of JSON (see ``core.sealed``) has the tokenizer's digest and the length and time of each document. Its content
is the tokens of all documents, the oldest first, 4 bytes each, little-endian. Several processes may share a file: each
adds its documents to those in the file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sakiyomi.core.sealed import SealedFile, SealedKind

KIND = SealedKind(b"SAKIMEM\n", 1, "memory file")
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
    header, body = KIND.read(path)
    tokens, documents, place = np.frombuffer(body, _INTEGERS).tolist(), [], 0
    for length, when in zip(header["lengths"], header["times"], strict=True):
        documents.append(Document(tuple(tokens[place : place + length]), when))
        place += length
    return Contents(header["tokenizer"], documents)


class MemoryFile(SealedFile):
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
        super().__init__(path, "memory file")
        self._tokenizer, self._vocab_size, self.most = tokenizer, vocab_size, limit // 4
        self.documents: list[Document] = self._read()
        self._pending: list[Document] = []

    def add(self, tokens: Sequence[int]) -> bool:
        """Add a document for ``save``; long ones are cut at the beginning. Returns whether it is new."""
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
        with self._writing():
            merged = {document.tokens: document for document in self._read()}
            for document in pending:
                merged.pop(document.tokens, None)  # one that comes again is the newest
                merged[document.tokens] = document
            self.documents = list(merged.values())
            while sum(len(document.tokens) for document in self.documents) > self.most:
                del self.documents[0]
            self._write()

    def _read(self) -> list[Document]:
        if not self.path.exists():
            return []
        found = read_memory(self.path)
        most = max((max(document.tokens, default=0) for document in found.documents), default=0)
        self._check_tokens(found.tokenizer, self._tokenizer, most, self._vocab_size)
        return found.documents

    def _write(self) -> None:
        documents = self.documents
        body = np.array([token for document in documents for token in document.tokens], _INTEGERS).tobytes()
        header = {
            "tokenizer": self._tokenizer,
            "lengths": [len(document.tokens) for document in documents],
            "times": [document.time for document in documents],
        }
        KIND.write(self.path, header, body)
