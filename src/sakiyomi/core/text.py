"""Turns tokens into text as they arrive: whole characters only, with stop strings, and little work for each push.

Two layers. ``_Pieces`` turns tokens into text that is certain: what it has given is a prefix of what the tokenizer
makes of all tokens together. ``TextStream`` looks for stop strings in that text and holds back what may begin one.
Neither depends on how the tokens are cut into pushes: a draft of five tokens gives the text of five single ones.

Why decoding token by token is wrong: one character may be several tokens (UTF-8 bytes), and what a token gives depends
on what stands before it (SentencePiece drops the first space only). So a window of a few tokens is decoded, and the
text that its head gave is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sakiyomi.core.errors import InputError

__all__ = ["Profile", "TextStream", "profile"]

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 24
"""Tokens after which the head of the window is cut: decoding 24 tokens takes 12 us, where 4 take 8."""
_LONGEST_RUN = 64
"""Byte tokens in a row after which whole characters are given although the run goes on, see ``_Pieces._close``."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of the tokens."""
        ...


@dataclass(frozen=True)
class Profile:
    """Properties of a tokenizer, examined once.

    Attributes:
        special: ids that ``skip_special_tokens`` skips.
        byte_of: byte value of each byte-fallback token (SentencePiece's ``<0x0A>``).
        tidies: whether decoding ends by removing spaces before punctuation.
    """

    special: frozenset[int]
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
        special=frozenset(i for i in candidates if text(i) == ""),
        byte_of=byte_of,
        tidies=bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
    )


class _Pieces:
    """Tokens in, certain text out.

    ``_window`` holds the last tokens without special ones; the first ``_taken`` characters of its text are given
    already. Its first ``_closed`` tokens are decided; behind them stand only tokens of an open run of bytes.
    ``_marks`` are places in the window at which a character ends.
    """

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._profile = profile(tokenizer)
        self._special, self._skips = self._profile.special - shown, not shown
        self._window: list[int] = []
        self._taken = 0
        self._closed = 0
        self._marks: list[int] = []

    def state(self) -> tuple[list[int], int, int, list[int]]:
        """What ``restore`` takes."""
        return list(self._window), self._taken, self._closed, list(self._marks)

    def restore(self, state: tuple[list[int], int, int, list[int]]) -> None:
        """Back to an earlier ``state()``."""
        self._window, self._taken, self._closed, self._marks = state

    def bytes_in(self, ids: Sequence[int]) -> bool:
        """Whether byte tokens are among the ids or await their end: then text ahead may come and go."""
        byte_of = self._profile.byte_of
        return bool(byte_of) and (self._closed < len(self._window) or any(i in byte_of for i in ids))

    def push(self, ids: Sequence[int]) -> tuple[str, str]:
        """Text that has become certain, and text that will follow it unless a run of bytes turns out invalid."""
        self._window += [i for i in ids if i not in self._special]
        closed = self._close()
        text = self._decode(self._window[:closed])
        certain = self._certain(text)
        new = text[self._taken : certain]
        self._taken = max(self._taken, certain)
        self._closed = closed
        ahead = ""
        run = bytes(self._profile.byte_of[i] for i in self._window[closed:])
        if run and _whole_characters(run) == len(run):
            ahead = self._decode(self._window)[self._taken :]
        if certain == len(text):
            self._shorten()
        elif len(self._window) > _LONGEST_RUN:
            new += self._cut_nonsense()
        return new, ahead

    def finish(self) -> str:
        """The rest, with a replacement character for what never became whole."""
        rest = self._decode(self._window)[self._taken :]
        self._window, self._taken, self._closed, self._marks = [], 0, 0, []
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)

    def _close(self) -> int:
        """Number of leading window tokens whose text can no longer change.

        A run of byte tokens is decoded as a whole: one stray byte turns every character of the run into replacement
        characters. So it stays open until another token ends it, or until it is so long that a reader should not wait.
        """
        byte_of = self._profile.byte_of
        start = len(self._window)
        while start > self._closed and self._window[start - 1] in byte_of:
            start -= 1
        run = bytes(byte_of[i] for i in self._window[start:])
        return start + _whole_characters(run) if len(run) > _LONGEST_RUN else start

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

    The joined results of ``push`` and ``finish`` are ``tokenizer.decode(ids, skip_special_tokens=True)``, up to a stop
    string. One exception, so that readers need not wait: in a row of more than 64 byte tokens, characters are given
    although a later stray byte would turn all of them into replacement characters.

    Args:
        tokenizer: a transformers tokenizer.
        stop: strings that end the text; none of them is part of it.
        shown: special tokens that are part of the text all the same.

    Attributes:
        stopped: no more tokens are taken.
        matched: the stop string that ended the text.

    Raises:
        InputError: a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), shown: frozenset[int] = frozenset()) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stop:
            raise InputError("a stop string is empty: it would end every text at once; leave it out")
        self._pieces = _Pieces(tokenizer, shown)
        self._pending = ""  # certain text that may be the beginning of a stop string
        self._given: list[str] = []
        self.stopped = False
        self.matched: str | None = None

    @property
    def text(self) -> str:
        """Everything given so far."""
        return "".join(self._given)

    def push(self, token_ids: Sequence[int]) -> tuple[str, int | None]:
        """Take new tokens.

        Args:
            token_ids: any number of them.

        Returns:
            The text that has become certain, and None; or, when a stop string is complete, the text before it and how
            many of these tokens were used, the one that completed it included. Nothing may be pushed after that.
        """
        assert not self.stopped, "tokens after the stop string"
        if not self._stop:
            return self._give(self._pieces.push(token_ids)[0]), None
        if not self._pieces.bytes_in(token_ids):
            # Certain text only grows, so one look at all of it is enough to know that no stop string is in it.
            state = self._pieces.state()
            new, ahead = self._pieces.push(token_ids)
            if self._find(self._pending + new + ahead) is None:
                return self._release(new), None
            self._pieces.restore(state)
        given = ""
        for used, token in enumerate(token_ids, start=1):
            new, ahead = self._pieces.push([token])
            place = self._find(self._pending + new + ahead)
            if place is not None:
                self.stopped = True
                text = self._pending + new + ahead
                self.matched = next(stop for stop in self._stop if text.startswith(stop, place))
                return given + self._give(text[:place]), used
            given += self._release(new)
        return given, None

    def finish(self) -> str:
        """The text that was held back, when no more tokens come; "" after a stop string."""
        if self.stopped:
            return ""
        self.stopped = True
        rest = self._pending + self._pieces.finish()
        return self._give(rest[: self._find(rest)])

    def _give(self, text: str) -> str:
        if text:
            self._given.append(text)
        return text

    def _find(self, text: str) -> int | None:
        """Where the first stop string begins."""
        return min((place for place in map(text.find, self._stop) if place >= 0), default=None)

    def _release(self, new: str) -> str:
        """Give what cannot be the beginning of a stop string, keep the rest."""
        text = self._pending + new
        longest = max(map(len, self._stop))
        keep = next(
            (n for n in range(min(longest - 1, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)),
            0,
        )
        self._pending = text[len(text) - keep :]
        return self._give(text[: len(text) - keep])


def _whole_characters(run: bytes) -> int:
    """Length of the run without an unfinished character at its end; all of it where it is no UTF-8 anyway."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return error.start if error.reason == "unexpected end of data" else len(run)
    return len(run)
