"""Replies that consist of messages in channels: thoughts, calls of tools, and what the user is told.

A message is ``{head}{body}TEXT{over}``. Its head names the channel, as in ``<|channel|>final``, or the recipient, as in
``to=user``, or both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_MARK = re.compile(r"<[^<>{}\s]+>|\[[A-Z_]+\]")
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"to=([A-Za-z0-9_.-]+)")
_NO_TOOLS = ("user", "assistant")  # recipients


def single(*texts: str) -> list[str]:
    """The parts of texts that look like single tokens."""
    return _MARK.findall(" ".join(texts))


class Head(NamedTuple):
    """What the head of a message says.

    Attributes:
        thoughts: the message is one of thoughts.
        tool: which the message calls; "" if it calls none.
    """

    thoughts: bool = False
    tool: str = ""


@dataclass(frozen=True)
class Channels:
    """How messages are written.

    Attributes:
        start: before the head of a message. The prompt ends with that of the first one.
        body: after the head.
        over: ends a message that another one follows.
        ends: marks that end the reply.
        thoughts: the channel of thoughts, or their recipient.
        before: heads of messages before the last one. The first is that of thoughts.
        text: head of the last message if that is a text.
        calls: heads of calls, with {name} in them.
        prefix: before names of tools that are recipients.
        several: a reply may have several calls.
    """

    start: str
    body: str
    over: str
    ends: tuple[str, ...]
    thoughts: str
    before: tuple[str, ...]
    text: str
    calls: tuple[str, ...]
    prefix: str = ""
    several: bool = False

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """Tokens of which the marks consist."""
        found = single(self.start, self.body, self.over, *self.ends, *self.before, self.text, *self.calls)
        return tuple(dict.fromkeys(found))

    @property
    def heads(self) -> tuple[str, ...]:
        """What the head of a message begins with; anything else is text."""
        return (*self.marks, "to=", _MARK.sub("", self.start))

    def head(self, text: str) -> Head:
        """What a head says."""
        channels, recipient = _CHANNEL.findall(text), _RECIPIENT.search(text)
        to = "" if recipient is None else recipient[1]
        if to and to not in (*_NO_TOOLS, self.thoughts):
            return Head(tool=to.removeprefix(self.prefix))
        return Head(self.thoughts in (to, *channels[-1:]))
