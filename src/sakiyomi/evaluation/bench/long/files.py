"""Reads JSON files of one's own, each value checked."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError, LoadError

__all__ = ["read_object", "read_rows", "require"]


def read_rows(path: Path, *, needs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Objects of a .jsonl file (or .jsonl.gz), one a line.

    Args:
        path: of the file.
        needs: keys that each must have.

    Raises:
        LoadError: the file cannot be read, or a line is no such object.
        InputError: it holds nothing.
    """
    number = 0
    for number, line in enumerate(filter(str.strip, _read(path).splitlines()), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        wanted = f"expected a JSON object{' with ' if needs else ''}{', '.join(needs)}"
        if not isinstance(row, dict):
            raise LoadError(f"row {number} of {str(path)!r} is {line.strip()!r:.60}; {wanted}")
        missing = [key for key in needs if key not in row]
        if missing:
            raise LoadError(f"row {number} of {str(path)!r} has no {missing[0]!r}; {wanted}")
        yield row
    if not number:
        raise InputError(f"there is no question in {str(path)!r}; expected a JSON object a line")


def read_object(path: Path) -> Mapping[str, Any]:
    """A JSON file that holds one object.

    Raises:
        LoadError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise LoadError(f"{str(path)!r} is no JSON ({error}); copy the file again") from None
    if not isinstance(value, dict):
        raise LoadError(f"{str(path)!r} holds no JSON object; expected one with an entry for each task")
    return value


def require(row: Mapping[str, Any], key: str, kind: type | tuple[type, ...], path: Path) -> Any:
    """A value of the right kind.

    Raises:
        LoadError: it is of another.
    """
    value = row[key]
    if not isinstance(value, kind):
        raise LoadError(f"{key!r} in {str(path)!r} is {value!r:.60}; it has to be {_kind(kind)}")
    return value


def _kind(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join({str: "a text", list: "a list", int: "a number"}.get(each, each.__name__) for each in kinds)


def _read(path: Path) -> str:
    try:
        raw = path.expanduser().read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise LoadError(f"{str(path)!r} cannot be read ({error}); expected a .jsonl file") from None
