"""Checkpoints: one file each, written whole or not at all, the last two kept; and errors of writing any file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import whole_file

KEEP = 2


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `state` as the checkpoint of `step` and delete all but the last two.

    The bytes go to a temporary file that is renamed when complete: a crash leaves the older checkpoints as they were.

    Raises:
        LoadError: it cannot be written.
    """
    path = folder / f"step-{step:08d}.pt"
    with writing(path), whole_file(path, ADVICE) as fresh, fresh.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    for old in checkpoints(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def load_checkpoint(folder: Path, *, peek: bool = False) -> dict[str, Any]:
    """State of the newest checkpoint.

    Args:
        folder: OUT/checkpoints.
        peek: tensors stay in the file, for a look at the small values.

    Raises:
        LoadError: there is none, or it cannot be read.
    """
    found = checkpoints(folder)
    if not found:
        raise LoadError(f"no checkpoint in {folder}, expected step-*.pt; start the run without --resume")
    try:
        with zipfile.ZipFile(found[-1]) as whole:  # as torch writes it, with a checksum of each tensor
            if not peek and (damaged := whole.testzip()):
                raise zipfile.BadZipFile(f"its part {damaged} is damaged")
        state: dict[str, Any] = torch.load(found[-1], map_location="cpu", weights_only=True, mmap=peek)
    except MemoryError:
        raise
    except Exception as error:  # damage has many kinds
        raise LoadError(f"cannot read checkpoint {found[-1]}: {error}; delete it to use the one before") from error
    return state


# ---------------------------------------------------------------- errors of writing


ADVICE = "make room there, or choose another --out. Where there is a checkpoint, --resume continues from it"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around code that writes `path`.

    Raises:
        LoadError: the disk is full, or the place cannot be written.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch meets a full disk with a RuntimeError of its own words; others are none of ours.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError | SafetensorError):
            cause = cause.__context__
        if cause is None:
            raise
        raise LoadError(f"cannot write {path}: {cause}; {ADVICE}") from error


def whole_lines(path: Path, together: int = 1) -> int:
    """Lines in the file after a last half-written one, if any, was cut off, and what does not fill a batch.

    Args:
        path: of the file.
        together: lines of a batch.
    """
    if not path.exists():
        return 0
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    count = len(lines) // together * together
    whole = sum(map(len, lines[:count]))
    if whole < len(content):
        os.truncate(path, whole)
    return count
