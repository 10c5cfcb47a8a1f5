"""Private files with users' texts or what was derived from them: atomic, with a checksum, shared by processes.

    8 bytes    magic
    a line     format version, and the checksum of all that follows
    a line     JSON, the header
    bytes      its content

A file is never half-written: it is written under another name and then moved. Only its owner may read it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import alone, whole_file


@dataclass(frozen=True)
class SealedKind:
    """A kind of such files.

    Attributes:
        magic: 8 bytes.
        version: of its format.
        name: for messages: "memory file".
    """

    magic: bytes
    version: int
    name: str

    def read(self, path: Path) -> tuple[dict[str, Any], bytes]:
        """Header and content of a file.

        Raises:
            LoadError: it cannot be read, is of another kind or format version, or is damaged.
        """
        remedy = f"`sakiyomi memory clear {path}` removes it"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise LoadError(f"the {self.name} {path} cannot be read: {error.strerror}") from None
        if not data.startswith(self.magic):
            raise LoadError(f"{path} is no {self.name} of sakiyomi; give another name")
        line, _, rest = data[len(self.magic) :].partition(b"\n")
        version, _, checksum = line.decode("ascii", "replace").partition(" ")
        if version != str(self.version):
            raise LoadError(
                f"the {self.name} {path} has format {version!r:.20}, this version reads {self.version}; {remedy}"
            )
        if checksum != f"{zlib.crc32(rest):08x}":
            raise LoadError(f"the {self.name} {path} is damaged: its checksum is another one; {remedy}")
        line, _, body = rest.partition(b"\n")
        header: dict[str, Any] = json.loads(line)
        return header, body

    def write(self, path: Path, header: dict[str, Any], body: bytes) -> None:
        """Write or replace a file."""
        rest = json.dumps(header).encode() + b"\n" + body
        with whole_file(path, "name another file", private=True) as fresh:
            fresh.write_bytes(self.magic + f"{self.version} {zlib.crc32(rest):08x}\n".encode() + rest)


class SealedFile:
    """A file that a drafter reads and adds to, as other processes may.

    Args:
        path: of the file, which is made when there is something to write.
        name, whose: for messages: "the {name} {path}{whose} cannot be kept".

    Raises:
        LoadError: its folder is not there.
    """

    def __init__(self, path: str | Path, name: str = "file", whose: str = "") -> None:
        self.path = Path(path).expanduser()
        self._called = f"the {name} {self.path}"
        if not self.path.parent.is_dir():
            raise LoadError(
                f"{self._called}{whose} cannot be kept: there is no folder {self.path.parent}; check the path, or make "
                "the folder"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock the folder; what the system refuses meanwhile is a LoadError."""
        try:
            with alone(self.path.parent):
                yield
        except OSError as error:
            raise LoadError(f"{self._called} cannot be written: {error.strerror or error}") from error

    def _check_tokens(self, found: str, tokenizer: str, most: int, vocab_size: int) -> None:
        """Refuse the tokenizer with the digest ``found``, and a token ``most``, where the target has others."""
        if found != tokenizer:
            raise LoadError(
                f"{self._called} is of another tokenizer ({found[:12]}, the target's is {tokenizer[:12]}): its tokens "
                "would mean other words; give each tokenizer a file of its own"
            )
        if most >= vocab_size:
            raise LoadError(
                f"{self._called} holds tokens that the target does not know, which has {vocab_size}; "
                "give it a file of its own"
            )
