"""What all sub-benchmarks share: rows that fail show their error, and results are kept line by line.

A sub-benchmark gives rows one after the other (``report.Row``); the command line prints each as a table, writes all as
one JSON object (``cli.rows``) and has them drawn (``pictures``). What takes long is kept in a file of JSON lines, each
written when it is measured, so that a run that was stopped continues.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import LoadError, SakiyomiError
from sakiyomi.evaluation.bench.report import Row


def attempted(name: str, title: str, measure: Callable[[], Row]) -> Row:
    """The row that is measured; one with an error in its place if a user could have caused it."""
    try:
        return measure()
    except SakiyomiError as error:
        return Row(name, title, [], error=error.message)


def whole_lines(path: Path) -> Iterator[str]:
    """Lines of a file; a last one that was not written to its end is left out.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    yield from text[: text.rfind("\n") + 1].splitlines()


def line(value: Any) -> str:
    """A value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"


def append(path: Path, values: Iterable[Any], remedy: str) -> None:
    """Append values to a file, a line of JSON each, and sync it to the disk.

    Args:
        path: of the file; it and its folder are made.
        values: for JSON.
        remedy: what to do if that fails.

    Raises:
        LoadError: they cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write("".join(map(line, values)).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror or error}; {remedy}") from None
