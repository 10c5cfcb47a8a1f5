"""Atomic writes of files and folders, which survive a power failure; locks of folders; the cache folder."""

from __future__ import annotations

import glob
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from sakiyomi.core.errors import InputError, LoadError

logger = logging.getLogger("sakiyomi")


def cache_folder() -> Path:
    """Where kernels, recordings, packed weights and profiles are kept.

    It is `$SAKIYOMI_CACHE_DIR`, else the user's cache folder; where that cannot be written, as in a container whose
    files are read-only, a folder of the user's own below that of temporary files, after one warning.
    """
    own = os.environ.get("SAKIYOMI_CACHE_DIR")
    return Path(own) if own else _default_folder(os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))


@cache
def _default_folder(caches: str | None, home: str | None) -> Path:
    try:
        place = Path(caches or Path(home or Path.home()) / ".cache") / "sakiyomi"
        there = next(path for path in (place, *place.parents) if path.exists())
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return place
        why = f"{place} cannot be written"
    except (OSError, RuntimeError) as error:  # there may be no home at all
        why = str(error)
    user = os.getuid() if hasattr(os, "getuid") else 0
    other = Path(tempfile.gettempdir()) / f"sakiyomi-{user}"
    with suppress(OSError):  # the first write there raises what is wrong with it
        other.mkdir(mode=0o700, exist_ok=True)
        found = other.lstat()
        if hasattr(os, "getuid") and (found.st_uid != user or found.st_mode & 0o077 or not other.is_dir()):
            # Another user may have put it there, and code into it.
            other = Path(tempfile.mkdtemp(prefix="sakiyomi-"))
    logger.warning("compiled code is kept in %s (%s); set SAKIYOMI_CACHE_DIR to a folder that lasts", other, why)
    return other


def sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def partial(path: Path) -> Path:
    """A temporary name beside a path; the file is moved to the path when it is complete."""
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


@contextmanager
def whole_folder(path: Path, advice: str) -> Iterator[Path]:
    """A folder to write to, which takes the place of ``path`` when the block ends, and is removed if the block fails.

    Args:
        path: of the folder; there is none, or an empty one.
        advice: what to do where it cannot be written.

    Raises:
        LoadError: it cannot be written.
    """
    path = path.absolute()
    fresh = partial(path)
    try:
        fresh.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        fresh.mkdir()
        yield fresh
        for each in (*fresh.iterdir(), fresh):
            sync(each)
        if path.is_dir():
            path.rmdir()
        fresh.replace(path)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror or error}; {advice}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def alone(folder: Path, busy: str = "") -> Iterator[None]:
    """Lock a folder against other processes that write there, where the system has such locks (Windows has none).

    Args:
        folder: an existing one; with ``busy`` it gets a file "lock", since on a network file system a folder's own lock
            does not hold for other machines.
        busy: the error where the lock is not free; "": wait for it, and run without one on a file system without locks.

    Raises:
        InputError: another process holds the lock, or the file system has no locks; only with ``busy``.
        LoadError: the lock's file cannot be written; only with ``busy``.
    """
    handle: int | None = None
    try:
        handle = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, 0o666) if busy else os.open(folder, os.O_RDONLY)
    except OSError as error:
        if busy:
            raise LoadError(f"cannot write {folder}: {error.strerror or error}; choose another output") from None
    if handle is None:
        yield
        return
    try:
        with suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
            except OSError:
                if busy:
                    raise InputError(busy) from None
        yield
    finally:
        os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files and folders of this path whose process is gone."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        process = leftover.name.removeprefix(f".{path.name}.").split(".")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            with suppress(OSError):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
