"""Names of GGUF files: what is one, and the pieces of a model that is cut into several. No head is read."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from sakiyomi.core.errors import LoadError

MAGIC = b"GGUF"
"""How such files begin."""
_PIECE = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a name stands for, or its first piece; None if it stands for something else.

    Files without the suffix are known by how they begin: Ollama keeps its models in such files.

    Raises:
        LoadError: a piece of the model is missing.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        return None
    if path.suffix.lower() != ".gguf":
        with suppress(OSError), path.open("rb") as file:
            return path if file.read(4) == MAGIC else None
        return None
    return pieces(path)[0]


def pieces(path: Path) -> tuple[Path, ...]:
    """All pieces of a model of which this file is one, in order; the file itself where its name says no other.

    Raises:
        LoadError: some are missing.
    """
    cut = _PIECE.fullmatch(path.name)
    if cut is None:
        return (path,)
    count = int(cut[3])
    if not 0 < int(cut[2]) <= count:
        raise LoadError(f"the name of {path} says it is piece {int(cut[2])} of {count}; give it the name that it had")
    found = tuple(path.with_name(f"{cut[1]}-{part:05}-of-{cut[3]}.gguf") for part in range(1, count + 1))
    if missing := [each.name for each in found if not each.is_file()]:
        raise LoadError(
            f"{len(missing)} of the {count} pieces of {cut[1]!r} are missing in {path.parent} "
            f"({', '.join(missing[:3])}); download them again"
        )
    return found
