"""Stop strings in a text that grows: where the first one begins, and what may still become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class StopStrings:
    """Holds back the end of a text while it may begin a stop string.

    Special tokens leave no text. A stop string that holds the name of one (``<|im_end|>``) is looked for in the text as
    it is with those tokens written by name, the others in the text itself.

    Args:
        stop: the stop strings.
        names: of the special tokens that the text leaves out.

    Attributes:
        names: those that stop strings hold.
        held: certain text that may begin a stop string.
    """

    def __init__(self, stop: Sequence[str], names: Mapping[int, str]) -> None:
        self.names = {i: name for i, name in names.items() if name and any(name in text for text in stop)}
        self._stop = [(text, any(name in text for name in self.names.values())) for text in stop]
        self._longest = max(map(len, stop), default=0)
        self._most = 1 + max((sum(map(text.count, {*self.names.values()})) for text in stop), default=0)
        self._marks: list[tuple[int, str]] = []  # places in the held text and behind it, and what is named there
        self.held = ""

    def __bool__(self) -> bool:
        return bool(self._stop)

    def mark(self, token: int, new: str) -> None:
        """Note a special token behind the held text and this one."""
        place = len(self.held + new)
        self._marks.append((place, self.names[token]))
        # Of a row that is longer than those in stop strings, the last ones tell as much as all of it.
        if len(self._marks) > self._most and self._marks[-1 - self._most][0] == place:
            del self._marks[-1 - self._most]

    def find(self, new: str) -> tuple[int, str] | None:
        """Position and text of the first stop string in the held text plus the new one; None: there is none."""
        text = self.held + new
        named = self._named(text)
        first: tuple[int, str] | None = None
        for stop, names in self._stop:
            place = (named if names else text).find(stop)
            if place >= 0 and names:
                place = self._unnamed(place)
            if place >= 0 and (first is None or place < first[0]):
                first = place, stop
        return first

    def release(self, new: str) -> str:
        """The part of the held and the new text that cannot begin a stop string; the rest stays held."""
        text = self.held + new
        named = self._named(text)
        keep = len(text) - self._beginning(text, names=False)
        if self.names:
            keep = min(keep, self._unnamed(len(named) - self._beginning(named, names=True)))
        self.held = text[keep:]
        self._marks = [(place - keep, name) for place, name in self._marks if place >= keep]
        return text[:keep]

    def _beginning(self, text: str, *, names: bool) -> int:
        """Characters at the end of the text that may begin one of the stop strings with names, or of the others."""
        stop = [stop for stop, has in self._stop if has is names]
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(each.startswith(text[-n:]) for each in stop):
                return n
        return 0

    def _named(self, text: str) -> str:
        """The text with special tokens by name."""
        parts, at = [], 0
        for place, name in self._marks:
            parts += [text[at:place], name]
            at = place
        return "".join([*parts, text[at:]])

    def _unnamed(self, place: int) -> int:
        """A place in ``_named`` as one in the text itself."""
        for at, name in self._marks:
            if place <= at:
                break
            place = max(at, place - len(name))
        return place
