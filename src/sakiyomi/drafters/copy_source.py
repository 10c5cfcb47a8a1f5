"""Finds the passage that a text copies: a text that retells or edits a passage follows it from beginning to end.

Several places may have the same last tokens. The likeliest source is the next one behind the place that was copied
last, before the newest place and the most frequent continuation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_SCANNED = 48  # most places that are compared
_LONGEST = 12  # tokens that are compared
_TURN = 64  # more tokens at once are a prompt, which does not copy itself


class CopySource:
    """Keeps track of what one text copies.

    Args:
        text: all tokens that were read, -1 where another text begins; its owner appends to it.
    """

    def __init__(self, text: list[int]) -> None:
        self._text = text
        self._after: dict[int, list[int]] = {}  # by two tokens the places behind them
        self._last = -1  # token that was read last
        self._copied, self._sure = -1, False  # place that was copied last, and whether that was the last token

    def read(self, tokens: Sequence[int]) -> None:
        """Learn tokens that were just appended to the text."""
        text, after, last = self._text, self._after, self._last
        place = len(text) - len(tokens)
        for token in tokens:
            place += 1
            if last >= 0:
                after.setdefault(last << 32 | token, []).append(place)
            last = token
        self._last = last
        if len(tokens) > _TURN:
            self._sure = False
            return
        for token in tokens:
            self._sure = self._sure and text[self._copied + 1] == token
            if not self._sure:
                break
            self._copied += 1

    def branch(self, head: Sequence[int], place: int) -> None:
        """Continue after another beginning, whose last token is at this place: what follows it does not count."""
        self._last = head[-1] if head else -1
        self._sure = False
        if len(head) > 1:
            places = self._after.get(head[-2] << 32 | head[-1], [])
            if place + 1 in places:
                places.remove(place + 1)

    def next(self, length: int) -> int:
        """The place that the text copies next; -1: unknown.

        Args:
            length: of the longest run of last tokens that stood here before.
        """
        if not self._sure and length > 1:
            place = self._found(min(length, _LONGEST))
            if place >= 0:
                self._copied, self._sure = place - 1, True
        return self._copied + 1 if self._sure and self._copied + 1 < len(self._text) else -1

    def _found(self, length: int) -> int:
        """The next place with a match of this length behind that which was copied last, else the first one."""
        text, end = self._text, len(self._text)
        if end < 2 or text[-2] < 0:
            return -1
        places = self._after.get(text[-2] << 32 | text[-1], [])
        first = bisect_left(places, self._copied + 1)
        for place in (*places[first : first + _SCANNED], *places[: min(first, _SCANNED)]):
            if place < end and text[max(0, place - length) : place] == text[end - length :]:
                return place
        return -1
