"""Learns from a chat template what stands around the thoughts and the text of a reply."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.server.learnt_format import ASKED, FIRST, IDS, ONE, SAID, TOOLS, Write, same_begin
from sakiyomi.server.said import MARK, TextMarks
from sakiyomi.server.thoughts import ThoughtMarks

THOUGHT = "THOUGHTTEXT"
_CALLED: Mapping[str, Any] = {
    "content": "", "tool_calls": [{"id": IDS[0], "type": "function", "function": {"name": FIRST, "arguments": ONE}}],
}  # fmt: skip


def learnt_thoughts(write: Write) -> ThoughtMarks | None:
    """What a template writes around the thoughts of a reply; None: it leaves them out."""
    plain = _before_text(write)
    for reply, behind in _replies():
        with suppress(InputError):
            found = write([ASKED, {"role": "assistant", **reply}], TOOLS if behind == FIRST else (), False)
            before, thought, rest = found.partition(THOUGHT)
            between, said, _ = rest.partition(behind)
            marks = _around(before, between) if thought and said else None
            if marks is not None and (behind == SAID or marks.opening not in plain):
                return marks  # what is before a text, too, is no mark of the thoughts before a call
    return None


_CUT = re.compile(r"""split\(\s*(?P<quote>['"])(?P<mark>[^'"]+)(?P=quote)\s*\)\s*\[-1\]""")


def cut_thoughts(write: Write, template: str) -> ThoughtMarks | None:
    """The marks around thoughts that a template cuts off earlier replies, where its prompts end with words of thoughts.

    None: it cuts off nothing.
    """
    with suppress(InputError):
        opening = re.split(MARK, write([ASKED], (), True))[-1].strip()
        for mark in dict.fromkeys(found["mark"] for found in _CUT.finditer(template)):
            reply = {"role": "assistant", "content": f"{THOUGHT}{mark}{SAID}"}
            found = write([ASKED, reply, ASKED], (), False)
            if opening and SAID in found and THOUGHT not in found:
                return ThoughtMarks(opening, mark)
    return None


def _replies() -> Iterator[tuple[Mapping[str, Any], str]]:
    """Replies with thoughts, and what follows these: some templates write them only as a part, or before calls."""
    names = ("reasoning_content", "thinking")
    yield from (({"content": SAID, name: THOUGHT}, SAID) for name in names)
    yield {"content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": SAID}]}, SAID
    yield from (({**_CALLED, name: THOUGHT}, FIRST) for name in names)


def _around(before: str, behind: str) -> ThoughtMarks | None:
    """The marks next to thoughts; a mark may be a word between two others, the same one on both sides."""
    named = re.match(rf"\s*({MARK}(\w+){MARK})", behind)
    if named is not None and (opening := re.search(rf"{MARK}{named[2]}{MARK}\s*\Z", before)) is not None:
        return ThoughtMarks(opening[0].strip(), named[1])
    opening, closing = re.search(rf"{MARK}\w*\s*\Z", before), re.match(rf"\s*{MARK}", behind)
    if opening is None or closing is None:
        return None
    return ThoughtMarks(opening[0].strip(), closing[0].strip())


def learnt_text(write: Write, thoughts: ThoughtMarks | None) -> TextMarks | None:
    """What a template writes around the text of a reply behind the beginning of a reply and thoughts; None: nothing."""
    with suppress(InputError):
        found = write([ASKED, {"role": "assistant", "content": SAID}], (), False)
        before, said, behind = found.rpartition(SAID)
        opening = before[len(same_begin(write([ASKED], (), True), before)) :]
        opening = opening.rpartition(thoughts.closing)[2] if thoughts is not None else opening
        marks, closing = re.fullmatch(rf"\s*((?:{MARK}\w*)+)\s*", opening), re.match(rf"(?:{MARK}\w*)+", behind)
        if said and marks is not None and closing is not None:
            return TextMarks(marks[1], closing[0])
    return None


def _before_text(write: Write) -> str:
    """What the template writes between a question and a text."""
    with suppress(InputError):
        found = write([ASKED, {"role": "assistant", "content": SAID}], TOOLS, False)
        return found.rpartition("QUESTION")[2].partition(SAID)[0]
    return ""
