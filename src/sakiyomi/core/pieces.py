"""A file of JSON lines made in pieces, each of which is complete or absent.

A piece is written to a temporary name and then moved to its number in a folder beside the file. So a piece that is made
twice exists once, a run that was killed is resumed by making the missing pieces, and the file has the order of the
numbers.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import alone, whole_file

ADVICE = "make room, and run the same command again"


class Pieces:
    """The pieces of a file.

    Attributes:
        out: the file.
    """

    out: Path

    @property
    def folder(self) -> Path:
        """Where the pieces are until the file has them."""
        return self.out.with_name(self.out.name + ".parts")

    def path(self, number: int) -> Path:
        """File of a piece."""
        return self.folder / f"{number:08d}.jsonl"

    def keep(self, number: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write a piece.

        Raises:
            LoadError: it cannot be written.
        """
        with whole_file(self.path(number), ADVICE) as fresh, fresh.open("wb") as file:
            file.writelines(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)

    def kept(self, number: int) -> list[dict[str, Any]]:
        """The records of a piece; none if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self.path(number).read_bytes().splitlines()]
        return []

    def remove(self) -> None:
        """Remove the folder: the file has what was in it.

        It is renamed first, so that a process killed while it removes files never leaves a folder with some pieces.
        """
        with contextlib.suppress(OSError):
            self.folder.rename(self._removed)
        shutil.rmtree(self.folder, ignore_errors=True)  # Windows does not rename a folder with an open file
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove what a killed :meth:`remove` left."""
        shutil.rmtree(self._removed, ignore_errors=True)

    @property
    def _removed(self) -> Path:
        return self.out.with_name(f".{self.out.name}.parts.removed")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs away from the pieces.

        Raises:
            InputError: another run holds the lock.
            LoadError: nothing can be written there.
        """
        self.remove_leftovers()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LoadError(f"cannot write {self.folder}: {error.strerror or error}; choose another output") from None
        with alone(self.folder, f"another run writes {self.out}; wait for it, or choose another output"):
            yield
