"""Thoughts, told apart from a reply while it comes: in channels, see ``channels.py``, or between two marks."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from sakiyomi.server.channels import Head, single
from sakiyomi.server.said import partial
from sakiyomi.server.tools import Found, Schemas, ToolFormat, called


class ThoughtMarks(NamedTuple):
    """What stands around thoughts."""

    opening: str
    closing: str


THINK = ThoughtMarks("<think>", "</think>")
"""Those of most models."""


class ChannelReader:
    """Splits a reply in channels into thoughts, text and calls while it is written.

    Texts of several messages have a blank line between them. What is said to a tool that is not offered is dropped.

    Args:
        form: with the channels, and how calls are written in them.
        names: makes ids of calls.
        schemas: of the offered tools.
        begun: the reply begins inside a message, whose head is in the prompt.
        thinking: inside thoughts.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Callable[[int], str] = secrets.token_hex,
        schemas: Schemas | None = None,
        *,
        begun: bool = False,
        thinking: bool = False,
    ) -> None:
        assert form.channels is not None
        self._form, self._channels, self._names, self._schemas = form, form.channels, names, schemas or {}
        over = (self._channels.over, *self._channels.ends, *single(self._channels.start))
        self._over = re.compile("|".join(map(re.escape, over)))
        self._pending, self._gap = "", ""
        self._inside = begun or thinking  # whether the text of a message has begun
        self._head = Head(thinking)
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, last: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """New thoughts, text and complete calls after this text; ``last``: the reply is over."""
        self._pending += text
        thoughts, reply, before = "", "", len(self.calls)
        while self._inside or self._opened(last):
            ended = self._ended(last)
            if self._head.tool and ended is None and not last:
                break
            said = self._pending[: ended.start()] if ended is not None else self._certain(last)
            if self._head.thoughts:
                thoughts += said
            elif plain := self._called(said) if self._head.tool else said:
                reply += self._gap + plain
                self._gap = ""
            if ended is None:
                self._pending = self._pending[len(said) :]
                break
            self._pending, self._inside = self._pending[ended.end() :], False
            self._gap = "" if self._head != Head() else "\n\n"
        return thoughts, reply, self.calls[before:]

    def _ended(self, last: bool) -> re.Match[str] | None:
        """The mark that ends the message. Arguments may contain a mark's text: the true end follows a whole call."""
        marks = list(self._over.finditer(self._pending))
        if self._head.tool in self._schemas:
            found = next((mark for mark in marks if self._read(self._pending[: mark.start()]) is not None), None)
            if found is not None or not last or self._read(self._pending) is not None:
                return found
        return marks[0] if marks else None

    def _opened(self, last: bool) -> bool:
        """Read the head of a message; False if it is incomplete, or the reply is over."""
        head, body, rest = self._pending.partition(self._channels.body)
        text = head.lstrip()
        plain = text and not any(text.startswith(each) or each.startswith(text) for each in self._channels.heads)
        if not (body or last or plain):
            return False
        if not body and not head.strip():
            self._pending = ""
            return False
        self._head = self._channels.head(head) if body else Head()
        self._pending = rest if body else head
        self._inside = True
        return True

    def _certain(self, last: bool) -> str:
        """The pending text without characters at its end that may begin a mark."""
        kept = 0 if last else partial(self._pending, self._channels.marks)
        return self._pending[: len(self._pending) - kept]

    def _read(self, text: str) -> list[Found] | None:
        """The calls of which a text consists; None: they are incomplete, or none."""
        opening = self._form.opening
        if not (text := text.lstrip()).startswith(opening):
            return None
        calls, rest = self._form.read(text[len(opening) :], self._schemas) or ([], text)
        return None if rest.strip() else calls

    def _called(self, text: str) -> str:
        """Add the calls of a message to a tool; gives the text if they are not valid."""
        if self._head.tool not in self._schemas:
            return ""
        calls = self._read(text)
        for name, arguments, _, _ in calls or ():
            written = json.dumps(arguments, ensure_ascii=False)
            self.calls.append(called(len(self.calls), self._names(5)[:9], name or self._head.tool, written))
        return text if calls is None else ""


# ---------------------------------------------------------------- between marks


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()


def ends_inside(text: str, marks: ThoughtMarks = THINK) -> bool:
    """Whether a text ends inside thoughts."""
    return text.rfind(marks.opening) > text.rfind(marks.closing)


class ReasoningReader:
    """Separates thoughts from a reply while it is written.

    Args:
        opened: the prompt ends inside thoughts, as templates of models that always think do.
        marks: around thoughts.
        call: what calls begin with, which ends thoughts that are never closed. "" if calls have no mark.
        special: marks that are special tokens, and no text therefore: behind the first thoughts, too, the opening one
            begins thoughts, and others are dropped.
    """

    def __init__(
        self, *, opened: bool = False, marks: ThoughtMarks = THINK, call: str = "", special: Sequence[str] = ()
    ) -> None:
        self._opening, self._closing = marks
        self._call, self._special = call, special
        self._marks = re.compile("|".join(map(re.escape, special)))
        self._place = _Place.INSIDE if opened else _Place.BEFORE
        self._pending = ""
        self._begun = False  # of thoughts, or of the reply after them: blank lines before them are dropped

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """New thoughts and reply after this text; ``last``: the reply is over."""
        self._pending += text
        if self._place is _Place.BEFORE and not self._entered(last):
            return "", ""
        thoughts, reply = "", ""
        while True:
            if self._place is _Place.INSIDE:
                thoughts += self._inside(last)
                if self._place is _Place.INSIDE:
                    return thoughts, reply
            kept = 0 if last else partial(self._pending, self._special)
            here = self._pending[: len(self._pending) - kept]
            mark = self._marks.search(here) if self._special else None
            if mark is None:
                self._pending = self._pending[len(here) :]
                return thoughts, reply + self._trimmed(here)
            reply += self._trimmed(here[: mark.start()])
            self._pending = self._pending[mark.end() :]
            if mark[0] == self._opening:
                self._place, self._begun = _Place.INSIDE, False

    def _entered(self, last: bool) -> bool:
        """Whether it is known that there are thoughts, or none."""
        ahead = self._pending.lstrip()
        if ahead.startswith(self._opening):
            self._place, self._pending = _Place.INSIDE, ahead[len(self._opening) :]
        elif ahead.startswith(self._closing):  # of thoughts that are left out
            self._place = _Place.INSIDE
        elif last or not any(mark.startswith(ahead) for mark in (self._opening, self._closing)):
            self._place, self._begun = _Place.BEHIND, True  # there are none: the reply is as it was written
        return self._place is not _Place.BEFORE

    def _inside(self, last: bool) -> str:
        """New thoughts; what is pending may be a reply after them."""
        inside, closing, rest = self._pending.partition(self._closing)
        call = -1 if closing or not self._call else inside.find(self._call)
        if call >= 0 and last:  # as if they were closed before it
            inside, closing, rest = inside[:call], self._closing, inside[call:]
        inside = inside.rstrip("\n") if closing else inside
        held = len(inside) - call if call >= 0 else 0
        waiting = _waiting(inside, held, self._closing, self._call)
        kept = "" if closing or last else inside[len(inside) - waiting :]
        thoughts = self._trimmed(inside[: len(inside) - len(kept)])
        self._pending = rest if closing else kept
        if closing:
            self._place, self._begun = _Place.BEHIND, False
        return thoughts

    def _trimmed(self, text: str) -> str:
        text = text if self._begun else text.lstrip("\n")
        self._begun = self._begun or bool(text)
        return text


def _waiting(text: str, held: int, *marks: str) -> int:
    """Characters at the end that are held, or may belong to one of the marks, and the blank lines before them."""
    before = text[: len(text) - (held or partial(text, marks))].rstrip("\n")
    return len(text) - len(before)
