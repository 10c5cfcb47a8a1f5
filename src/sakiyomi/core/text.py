"""Turns tokens into text as they arrive: whole characters only, with stop strings, and little work for each push.

Two layers. ``_Pieces`` turns tokens into text that is certain: what it has given is a prefix of what the tokenizer
makes of all tokens together. ``TextStream`` looks for stop strings in that text and holds back what may begin one.
Neither depends on how the tokens are cut into pushes: a draft of five tokens gives the text of five single ones.

Why decoding token by token is wrong: one character may be several tokens (UTF-8 bytes), and what a token gives depends
on what stands before it (SentencePiece drops the first space only). So a window of a few tokens is decoded, and the
text that its head gave is cut off. The window of a continuation begins with the end of its prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sakiyomi.core.errors import InputError
from sakiyomi.core.stops import StopStrings

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 24
"""Tokens after which the head of the window is cut: decoding 24 tokens takes 12 us, where 4 take 8."""
_CONTEXT = 16
"""Tokens of a prompt that its continuation is decoded behind, if there is text in them."""
_LONGEST_RUN = 64
"""Byte tokens in a row after which whole characters are given although the run has not ended, see ``_close``."""


@dataclass(frozen=True)
class Profile:
    """Properties of a tokenizer, examined once.

    Attributes:
        special: ids that ``skip_special_tokens`` skips, with the name of each.
        byte_of: byte value of each byte-fallback token (SentencePiece's ``<0x0A>``).
        tidies: whether decoding ends by removing spaces before punctuation.
    """

    special: dict[int, str]
    byte_of: dict[int, int]
    tidies: bool


# A profile takes some milliseconds for a tokenizer of many special tokens, and every request makes a stream.
_profiles: WeakKeyDictionary[Any, Profile] = WeakKeyDictionary()


def profile(tokenizer: Any) -> Profile:
    """The properties of a tokenizer."""
    known = _profiles.get(tokenizer)
    if known is None:
        known = _profiles[tokenizer] = _examine(tokenizer)
    return known


def _examine(tokenizer: Any) -> Profile:
    def text(*ids: int) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    candidates = {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    candidates |= {int(i) for i, token in added.items() if getattr(token, "special", False)}
    byte_of: dict[int, int] = {}
    if hasattr(tokenizer, "convert_tokens_to_ids"):
        names = [f"<0x{value:02X}>" for value in range(256)]
        ids = tokenizer.convert_tokens_to_ids(names)
        # A tokenizer without such tokens gives its unknown token, or none, for these names.
        back = [None if i is None else tokenizer.convert_ids_to_tokens(i) for i in ids]
        byte_of = {i: value for value, i in enumerate(ids) if back[value] == names[value]}
        letter = [i for i, value in byte_of.items() if value == ord("A")]
        if not letter or text(letter[0]) != "A":
            byte_of = {}
    return Profile(
        special={i: str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(candidates) if text(i) == ""},
        byte_of=byte_of,
        tidies=bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
    )


class _Pieces:
    """Tokens in, certain text out.

    ``_window`` holds the last tokens without special ones; the first ``_taken`` characters of its text are given
    already. Its first ``_closed`` tokens are decided; behind them stand only tokens of an open run of bytes.
    ``_marks`` are places in the window at which a character ends.

    Args:
        tokenizer: a transformers tokenizer.
        shown: special tokens that are part of the text.
        before: tokens that stand before the text.
    """

    def __init__(self, tokenizer: Any, shown: frozenset[int], before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._profile = profile(tokenizer)
        self.special, self._skips = self._profile.special.keys() - shown, not shown
        self._window = self._context(before)
        self._closed = 0
        self._closed = self._run()
        self._taken = self._certain(self._decode(self._window[: self._closed]))
        self._marks: list[int] = []
        self._known = self._decode(self._window)[self._taken :]  # an unfinished character, or an open run of bytes

    def copy(self) -> _Pieces:
        """A copy with the same state."""
        other = copy.copy(self)
        other._window, other._marks = list(self._window), list(self._marks)
        return other

    @property
    def open(self) -> bool:
        """Whether byte tokens await the end of their run."""
        return self._closed < len(self._window)

    def bytes_in(self, ids: Sequence[int]) -> bool:
        """Whether byte tokens are among the ids or await their end: then text ahead may come and go."""
        byte_of = self._profile.byte_of
        return bool(byte_of) and (self.open or any(i in byte_of for i in ids))

    def push(self, ids: Sequence[int]) -> str:
        """Text that has become certain."""
        more = [i for i in ids if i not in self.special]
        if not more:  # the window may be long, see ``_context``
            return ""
        self._window += more
        closed = self._close()
        text = self._decode(self._window[:closed])
        certain = self._certain(text)
        new = text[self._taken : certain]
        self._taken = max(self._taken, certain)
        self._closed = closed
        if certain == len(text):
            self._shorten()
        elif len(self._window) > _LONGEST_RUN:
            new += self._cut_nonsense()
        fresh = self._fresh(new)
        self._known = self._known[len(new) :] if not fresh else ""
        return fresh

    def ahead(self) -> str:
        """Text after the certain part, as it would be if no token followed; without an unfinished last character."""
        run = bytes(self._profile.byte_of[i] for i in self._window[self._closed :])
        text = self._decode(self._window[: self._closed + _whole_characters(run)])
        return self._fresh(text[self._taken :].rstrip(_UNKNOWN))

    def finish(self) -> str:
        """The rest, with a replacement character for what never became whole."""
        rest = self._fresh(self._decode(self._window)[self._taken :])
        self._window, self._taken, self._closed, self._marks, self._known = [], 0, 0, [], ""
        return rest

    def _fresh(self, text: str) -> str:
        """The part of the text after ``_taken`` that the tokens before have not shown."""
        same = 0
        while same < min(len(text), len(self._known)) and text[same] == self._known[same]:
            same += 1
        return text[same:]

    def _context(self, before: Sequence[int]) -> list[int]:
        """The last tokens of ``before``, enough of them that they have text, with whole runs of bytes."""
        found: list[int] = []
        least = _CONTEXT
        for token in reversed(before):
            if token in self._profile.special:
                continue
            found.append(token)
            if len(found) < least or token in self._profile.byte_of:
                continue
            if self._decode(found[::-1]):
                break
            least *= 2
        return found[::-1]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips))

    def _close(self) -> int:
        """Number of leading window tokens whose text can no longer change.

        A run of byte tokens is decoded as a whole: one stray byte turns every character of the run into replacement
        characters. So it stays open until another token ends it, or until it is so long that a reader should not wait.
        """
        start = self._run()
        run = bytes(self._profile.byte_of[i] for i in self._window[start:])
        return start + _whole_characters(run) if len(run) > _LONGEST_RUN else start

    def _run(self) -> int:
        """Where the run of byte tokens at the end of the window begins."""
        start = len(self._window)
        while start > self._closed and self._window[start - 1] in self._profile.byte_of:
            start -= 1
        return start

    def _certain(self, text: str) -> int:
        """Length of the text without an end that later tokens may change."""
        if text.endswith(_UNKNOWN):
            return len(text.rstrip(_UNKNOWN))
        if self._profile.tidies:
            # " n't" and " ' " lose their space only when they are complete.
            space = text.find(" ", max(len(text) - 3, 0))
            return len(text) if space < 0 else space
        return len(text)

    def _shorten(self) -> None:
        """Drop tokens from the head of the window; call where a character ends."""
        if self._closed and (not self._marks or self._marks[-1] < self._closed):
            self._marks.append(self._closed)
        if len(self._window) <= _WINDOW:
            return
        # Some text has to stay in front: the first token of a window loses its leading space.
        for mark in reversed(self._marks[:-1]):
            context = self._decode(self._window[mark : self._closed])
            if context:
                del self._window[:mark]
                self._taken = len(context)
                self._closed -= mark
                self._marks = [self._closed]
                return

    def _cut_nonsense(self) -> str:
        """Keep the window short when no character ever ends (a model that emits stray bytes only)."""
        whole = self._decode(self._window)
        for cut in range(len(self._window) - 1, len(self._window) - 5, -1):
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == whole:
                new = head[self._taken :]
                del self._window[:cut]
                self._taken, self._closed, self._marks = 0, max(self._closed - cut, 0), []
                return new
        return ""


class TextStream:
    """Text of one request, given as its tokens come.

    The joined results of ``push`` and ``finish`` are what ``tokenizer.decode(before + ids, skip_special_tokens=True)``
    has behind the text of ``before``, up to a stop string. One exception, so that readers need not wait: in a row of
    more than 64 byte tokens, characters are given although a later stray byte would turn all of them into replacement
    characters.

    Args:
        tokenizer: a transformers tokenizer.
        stop: strings that end the text; none of them is part of it. Where one holds the name of a special token, that
            token is looked for although the text leaves it out.
        shown: special tokens that are part of the text all the same.
        before: tokens that stand before the text: the prompt.

    Attributes:
        stopped: no more tokens are taken.
        matched: the stop string that ended the text.

    Raises:
        InputError: a stop string is empty.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        shown: frozenset[int] = frozenset(),
        before: Sequence[int] = (),
    ) -> None:
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stop:
            raise InputError("a stop string is empty: it would end every text immediately; leave it out")
        self._pieces = _Pieces(tokenizer, shown, before)
        names = profile(tokenizer).special if stop else {}
        self._stops = StopStrings(stop, {i: name for i, name in names.items() if i in self._pieces.special})
        self._given: list[str] = []
        self._length = 0  # of what was given
        self.stopped = False
        self.matched: str | None = None

    @property
    def text(self) -> str:
        """Everything given so far."""
        return "".join(self._given)

    @property
    def awaited(self) -> str:
        """Text of the tokens so far that is not given yet, as far as it can be read."""
        return "" if self.stopped else self._stops.held + self._pieces.ahead()

    @property
    def place(self) -> int:
        """Where in the text the next token begins."""
        return self._length + len(self.awaited)

    def push(self, token_ids: Sequence[int]) -> tuple[str, int | None]:
        """Take new tokens.

        Args:
            token_ids: any number of them.

        Returns:
            The text that has become certain, and None; or, when a stop string is complete, the text before it and how
            many of these tokens were used, the one that completed it included. Nothing may be pushed after that.
        """
        assert not self.stopped, "tokens after the stop string"
        if not self._stops:
            return self._give(self._pieces.push(token_ids)), None
        if not self._pieces.bytes_in(token_ids) and self._stops.names.keys().isdisjoint(token_ids):
            # Certain text only grows, so one look at all of it is enough to know that no stop string is in it.
            kept = self._pieces.copy()
            new = self._pieces.push(token_ids)
            if self._stops.find(new) is None:
                return self._give(self._stops.release(new)), None
            self._pieces = kept
        given = ""
        for used, token in enumerate(token_ids, start=1):
            new = self._pieces.push([token])
            named = token in self._stops.names
            ahead = self._pieces.ahead() if named or self._pieces.open else ""
            if named:
                self._stops.mark(token, new + ahead)
            if (found := self._stops.find(new + ahead)) is not None:
                return given + self._end(self._stops.held + new + ahead, found), used
            given += self._give(self._stops.release(new))
        return given, None

    def finish(self) -> str:
        """The text that was held back, when no more tokens come; "" after a stop string."""
        if self.stopped:
            return ""
        rest = self._pieces.finish()
        return self._end(self._stops.held + rest, self._stops.find(rest))

    def _end(self, text: str, found: tuple[int, str] | None) -> str:
        """Give the last text, up to a stop string."""
        self.stopped = True
        place, self.matched = (len(text), None) if found is None else found
        return self._give(text[:place])

    def _give(self, text: str) -> str:
        if text:
            self._given.append(text)
            self._length += len(text)
        return text


def _whole_characters(run: bytes) -> int:
    """Length of the run without an unfinished character at its end; all of it where it is no UTF-8 anyway."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return error.start if error.reason == "unexpected end of data" else len(run)
    return len(run)
