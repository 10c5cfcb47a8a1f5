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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import whole_file


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
