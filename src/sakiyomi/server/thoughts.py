"""Thoughts, told apart from a reply while it comes: in channels, as gpt-oss writes, or between two marks.

A reply in channels consists of messages: thoughts, calls of tools, and what the user is told.
A message is ``<|start|>assistant<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>TEXT<|end|>``; the first one's
beginning is in the prompt, and the last one ends with ``<|return|>`` or ``<|call|>``.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NamedTuple

from sakiyomi.server.tools import MARKS, Schemas, called


class ThoughtMarks(NamedTuple):
    """What stands around thoughts."""

    opening: str
    closing: str


THINK = ThoughtMarks("<think>", "</think>")
"""Those of most models."""
IN_CHANNELS = ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>")
"""Around thoughts that are a message in channels."""
ENDS = ("<|call|>", "<|return|>")
"""Tokens that end a reply."""
_HEADS = (*MARKS, "to=", "assistant")  # what the head of a message begins with; anything else is text
_BODY, _OVER = "<|message|>", re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")


class ChannelReader:
    """Splits a reply in channels into thoughts, text and calls while it is written.

    Args:
        names: makes ids of calls.
        schemas: of the offered tools; calls of others are text.
        begun: the reply begins inside a message, whose head is in the prompt.
        thinking: inside thoughts.
    """

    def __init__(
        self,
        names: Callable[[int], str] = secrets.token_hex,
        schemas: Schemas | None = None,
        *,
        begun: bool = False,
        thinking: bool = False,
    ) -> None:
        self._names, self._schemas = names, schemas or {}
        self._pending = ""
        self._inside = begun or thinking  # whether the text of a message has begun
        self._channel, self._tool = "analysis" if thinking else "", ""
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, last: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """New thoughts, text and complete calls after this text; ``last``: the reply is over."""
        self._pending += text
        thoughts, reply, before = "", "", len(self.calls)
        while True:
            if not self._inside and not self._opened(last):
                break
            ended = self._ended(last)
            whole = ended is not None or last
            said = self._pending[: ended.start()] if ended is not None else self._certain(last)
            if self._tool and not whole:
                break
            if self._tool:
                reply += self._called(said)
            elif self._channel == "analysis":
                thoughts += said
            else:
                reply += said
            self._pending = self._pending[len(said) :]
            if ended is None:
                break
            self._pending = self._pending[ended.end() - ended.start() :]
            self._inside = False
            if self._channel == "commentary" and not self._tool:
                reply += "\n\n"  # what is said before calls, and the reply itself, are messages of their own
        return thoughts, reply, self.calls[before:]

    def _ended(self, last: bool) -> re.Match[str] | None:
        """The mark that ends the message. Arguments may contain a mark's text: the true end follows complete JSON."""
        marks = list(_OVER.finditer(self._pending))
        if self._tool:
            found = next((mark for mark in marks if _is_json(self._pending[: mark.start()])), None)
            if found is not None or not last:
                return found
        return marks[0] if marks and not (self._tool and _is_json(self._pending)) else None

    def _opened(self, last: bool) -> bool:
        """Read the head of a message; False if it is incomplete, or the reply is over."""
        head, body, rest = self._pending.partition(_BODY)
        text = head.lstrip()
        plain = text and not any(text.startswith(each) or each.startswith(text) for each in _HEADS)
        if not (body or last or plain):
            return False
        if not body and not head.strip():
            self._pending = ""
            return False
        channels, tool = _CHANNEL.findall(head), _RECIPIENT.search(head)
        self._channel = channels[-1] if body and channels else ""
        self._tool = tool[1] if body and tool is not None else ""
        self._pending = rest if body else head
        self._inside = True
        return True

    def _certain(self, last: bool) -> str:
        """The pending text without characters at its end that may begin a mark."""
        text = self._pending
        longest = min(len(text), max(map(len, MARKS)) - 1)
        kept = 0 if last else next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in MARKS)), 0)
        return text[: len(text) - kept]

    def _called(self, arguments: str) -> str:
        """Add a call; gives the text if it is not a valid one."""
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if self._tool not in self._schemas:
            return arguments
        id_ = self._names(5)[:9]
        self.calls.append(called(len(self.calls), id_, self._tool, json.dumps(value, ensure_ascii=False)))
        return ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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
    """

    def __init__(self, *, opened: bool = False, marks: ThoughtMarks = THINK, call: str = "") -> None:
        self._opening, self._closing = marks
        self._call = call
        self._place = _Place.INSIDE if opened else _Place.BEFORE
        self._pending = ""
        self._begun = False  # of thoughts, or of the reply after them: blank lines before them are dropped

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """New thoughts and reply after this text; ``last``: the reply is over."""
        self._pending += text
        thoughts, reply = "", ""
        if self._place is _Place.BEFORE:
            ahead = self._pending.lstrip()
            if ahead.startswith(self._opening):
                self._place, self._pending = _Place.INSIDE, ahead[len(self._opening) :]
            elif ahead.startswith(self._closing):  # of thoughts that are left out
                self._place = _Place.INSIDE
            elif last or not any(mark.startswith(ahead) for mark in (self._opening, self._closing)):
                self._place, self._begun = _Place.BEHIND, True  # there are none: the reply is as it was written
            else:
                return "", ""
        if self._place is _Place.INSIDE:
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
            if not closing:
                return thoughts, ""
            self._place, self._begun = _Place.BEHIND, False
        reply, self._pending = self._trimmed(self._pending), ""
        return thoughts, reply

    def _trimmed(self, text: str) -> str:
        text = text if self._begun else text.lstrip("\n")
        self._begun = self._begun or bool(text)
        return text


def _waiting(text: str, held: int, *marks: str) -> int:
    """Characters at the end that are held, or may belong to one of the marks, and the blank lines before them."""
    begun = (n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    before = text[: len(text) - (held or max(begun, default=0))].rstrip("\n")
    return len(text) - len(before)
