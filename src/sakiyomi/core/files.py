"""Files that are written whole or not at all, also where the machine loses its power."""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from sakiyomi.core.errors import LoadError

__all__ = ["partial", "remove_leftovers", "sync", "whole_file"]


def sync(path: Path) -> None:
    """Have the content of a file, or the names in a folder, on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def partial(path: Path) -> Path:
    """Where this process writes what is to be at the path when it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")


@contextmanager
def whole_file(path: Path, advice: str, *, private: bool = False) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` when the block ends, and is removed if the block fails.

    Args:
        path: of the file; its folder is made.
        advice: what to do where it cannot be written.
        private: only its owner may read it, from its first byte on, whatever the umask says.

    Raises:
        LoadError: it cannot be written.
    """
    fresh = partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        if private:
            os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield fresh
        sync(fresh)  # or the name could be on the disk before the content
        fresh.replace(path)
        with suppress(OSError):  # the file is there; some file systems do not sync folders
            sync(path.parent)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror or error}; {advice}") from None
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove what writers of this file left when they were killed."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        process = leftover.name.removeprefix(f".{path.name}.").split(".")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            with suppress(OSError):
                leftover.unlink()
