"""The text of a reply, which some models write between marks of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

MARK = r"(?:<[^<>]+>|\[/?[A-Z_]+\])"
"""A mark of a chat template, as a pattern."""


def partial(text: str, marks: Iterable[str]) -> int:
    """Characters at the end of a text that may begin one of the marks."""
    return max((n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), default=0)


class TextMarks(NamedTuple):
    """What stands around the text of a reply; the end of ``closing`` may be missing."""

    opening: str
    closing: str


class TextReader:
    """Takes the marks around a reply's text away while it is written. Text without an opening mark stays as it is.

    Args:
        marks: of the model.
    """

    def __init__(self, marks: TextMarks) -> None:
        self._marks = list(marks)  # those that are still to come
        self._pending = ""
        self._first = len(found[0]) if (found := re.match(MARK, marks.closing)) is not None else len(marks.closing)

    def push(self, text: str, last: bool) -> str:
        """New text of the reply; ``last``: the reply is over. What follows the closing mark is dropped."""
        self._pending += text
        given = ""
        while self._marks and self._marks[0] in self._pending:
            before, _, self._pending = self._pending.partition(self._marks.pop(0))
            given += before
        if not self._marks:
            return given
        kept = partial(self._pending, self._marks[:1])
        said, self._pending = self._pending[: len(self._pending) - kept], self._pending[len(self._pending) - kept :]
        cut = len(self._marks) == 1 and kept >= self._first
        return given + said + (self._pending if last and not cut else "")
