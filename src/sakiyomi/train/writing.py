"""What goes wrong while the files of a run are written, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from sakiyomi.core.errors import LoadError

ADVICE = "make room there, or choose another --out. Where there is a checkpoint, --resume goes on from it"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around whatever writes `path`.

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
