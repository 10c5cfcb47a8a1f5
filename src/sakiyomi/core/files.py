"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sakiyomi.core.errors import LoadError

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path, advice: str) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` when the block ends, and is removed if the block fails.

    Args:
        path: of the file; its folder is made.
        advice: what to do where it cannot be written.

    Raises:
        LoadError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
        fresh.replace(path)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror or error}; {advice}") from None
    finally:
        fresh.unlink(missing_ok=True)
