"""Thoughts, which models write between ``<think>`` and ``</think>`` in front of a reply: told apart while they come."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["CLOSING", "OPENING", "ReasoningReader", "ends_inside"]

OPENING, CLOSING = "<think>", "</think>"


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()


def ends_inside(text: str) -> bool:
    """Whether a text ends inside thoughts."""
    return text.rfind(OPENING) > text.rfind(CLOSING)


class ReasoningReader:
    """Takes thoughts out of a text while it comes.

    Args:
        opened: the prompt ends with the mark that opens them, as templates of models that always think have it.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self._place = _Place.INSIDE if opened else _Place.BEFORE
        self._pending = ""
        self._begun = False  # whether thoughts, or then the reply, have begun: blank lines before them are left out

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """Thoughts and reply of what became certain with this text; ``last``: no more comes."""
        self._pending += text
        thoughts, reply = "", ""
        if self._place is _Place.BEFORE:
            ahead = self._pending.lstrip()
            if ahead.startswith(OPENING):
                self._place, self._pending = _Place.INSIDE, ahead[len(OPENING) :]
            elif last or not OPENING.startswith(ahead):
                self._place, self._begun = _Place.BEHIND, True  # there are none: the reply is as it was written
            else:
                return "", ""
        if self._place is _Place.INSIDE:
            inside, closing, rest = self._pending.partition(CLOSING)
            inside = inside.rstrip("\n") if closing else inside
            kept = "" if closing or last else inside[len(inside) - _waiting(inside) :]
            thoughts = self._trimmed(inside[: len(inside) - len(kept)])
            self._pending = rest if closing else kept
            if not closing:
                return thoughts, ""
            self._place, self._begun = _Place.BEHIND, False
        reply, self._pending = self._trimmed(self._pending), ""
        return thoughts, reply

    def _trimmed(self, text: str) -> str:
        text = text if self._begun else text.lstrip("\n")
        self._begun = self._begun or bool(text)
        return text


def _waiting(text: str) -> int:
    """Characters at the end that may belong to the mark that closes thoughts, or to the blank lines before it."""
    mark = next((n for n in range(len(CLOSING) - 1, 0, -1) if text.endswith(CLOSING[:n])), 0)
    before = text[: len(text) - mark]
    return mark + len(before) - len(before.rstrip("\n"))
