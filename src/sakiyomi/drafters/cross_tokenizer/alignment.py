"""Converts a growing text between the tokens of two tokenizers.

Both sides are compared as bytes. `Lexicon` holds the bytes of every token, so a token may end inside a character.
`Mirror` holds a growing text in tokens of the other tokenizer and re-tokenises only its tail. `continuation` gives the
tokens of a text that follows committed tokens.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sakiyomi.cache.prefix import alike
from sakiyomi.core.text import profile
from sakiyomi.drafters.cross_tokenizer.borders import Borders, Cut

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_ANCHORS = ("a", "e", "の", ".", "1", "x")
_SPACES = "\n\r\t\u00a0\u3000"
_SKIP = 16
"""Most bytes of unknown characters that a tokenizer may skip before its next token."""
_BACK = 24
"""Bytes at the end of a text that are re-tokenised when it grows."""


class Lexicon:
    """The bytes of every token of a tokenizer. Made once for each tokenizer, see ``of``.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer
        known = profile(tokenizer)
        self.special, self._byte_of = known.special, known.byte_of
        self.pieces: list[bytes] = self._read()
        """Bytes of each token; empty for special tokens, and where they are not known."""
        self.ids: dict[bytes, int] = {}
        """A token for each piece; where several have the same bytes, one that is no byte token."""
        for i in sorted(range(len(self.pieces)), key=lambda i: (i not in self._byte_of, -i)):
            if self.pieces[i]:
                self.ids[self.pieces[i]] = i
        self._longest = max(map(len, self.ids), default=0)
        self._sorted = sorted(self.ids)
        self.borders = Borders(self.pieces, self.cut)

    @classmethod
    def of(cls, tokenizer: Any) -> Lexicon:
        """The lexicon of a tokenizer; later calls return the same one."""
        known = _lexicons.get(tokenizer)
        if known is None:
            known = _lexicons[tokenizer] = cls(tokenizer)
        return known

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        if self._backend is not None:  # a tenth of the time of the call of the tokenizer itself
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def cut(self, text: str) -> Cut:
        """Tokens of a text, and where they end in its bytes."""
        tokens = self.encode(text)
        return tokens, self.ends(tokens, text.encode())

    def piece(self, token: int) -> bytes:
        """Bytes of a token; none for an id that the tokenizer does not have."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """Bytes of the tokens, joined; none for ids that the tokenizer does not have."""
        pieces = self.pieces
        return b"".join([pieces[i] for i in tokens if i < len(pieces)])

    def tail(self, tokens: Sequence[int]) -> bytes:
        """The bytes after the last special token, from a whole character on: they may join what follows."""
        known = len(tokens)
        while known and self.piece(tokens[known - 1]):
            known -= 1
        said = self.bytes_of(tokens[known:])
        lead = 0
        while lead < len(said) and said[lead] & 0xC0 == 0x80:
            lead += 1
        return said[lead:]

    def says(self, text: str) -> bool:
        """Whether the tokenizer reproduces a text unchanged."""
        return self.bytes_of(self.encode(text)).endswith(text.encode())

    def ends(self, tokens: Sequence[int], data: bytes) -> list[int]:
        """Where in ``data`` each of its tokens ends; -1 where that is unknown.

        Tokenizers may add a space before the first word, skip unknown characters or have one token for all of them. The
        next token then shows where these end.
        """
        found: list[int] = []
        place = 0
        for i in tokens:
            piece = self.pieces[i]
            if not found and piece.startswith(b" ") and not data.startswith(b" "):
                piece = piece[1:]
                if not piece:
                    found.append(0)
                    continue
            if not piece:
                found.append(-1)
                continue
            if not data.startswith(piece, place):
                place_of = data.find(piece, place, place + _SKIP + len(piece))
                if place_of < 0:
                    found.append(-1)
                    continue
                place = place_of
                if found:
                    found[-1] = -1  # what was left out may belong to it
            place += len(piece)
            found.append(place)
        return found

    def longer(self, beginning: bytes) -> list[int]:
        """Tokens that begin with these bytes and are longer."""
        first = bisect_right(self._sorted, beginning)
        last = bisect_right(self._sorted, beginning + b"\xff" * self._longest)
        return [self.ids[piece] for piece in self._sorted[first:last]]

    def spell(self, data: bytes) -> list[int]:
        """Tokens with exactly these bytes, from the left always the longest; as far as there are any."""
        found: list[int] = []
        place = 0
        while place < len(data):
            for length in range(min(self._longest, len(data) - place), 0, -1):
                token = self.ids.get(data[place : place + length])
                if token is not None:
                    found.append(token)
                    place += length
                    break
            else:
                break
        return found

    def _read(self) -> list[bytes]:
        """Bytes of every token: what it adds to a token before it, since alone it may lose its first space."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        anchor = self._anchor()
        texts = self._decode([[anchor, i] for i in range(size)])
        before = self._decode([[anchor]])[0]
        letters = {letter: value for value, letter in bytes_to_unicode().items()}
        pieces: list[bytes] = []
        for i, text in enumerate(texts):
            if i in self.special or not text.startswith(before):
                pieces.append(b"")
            elif i in self._byte_of:
                pieces.append(bytes([self._byte_of[i]]))
            elif _UNKNOWN in text:  # part of a character, in the letters of byte-level vocabularies, or an unknown one
                name = self._tokenizer.convert_ids_to_tokens(i)
                written = isinstance(name, str) and all(letter in letters for letter in name)
                pieces.append(bytes(letters[letter] for letter in name) if written else b"")
            else:
                pieces.append(text[len(before) :].encode())
        return pieces

    def _anchor(self) -> int:
        """A token that ends a character, so that the token behind it is decoded independently."""
        for text in _ANCHORS:
            ids = self.encode(text)
            if ids and self._decode([[ids[-1]]])[0].strip() not in ("", _UNKNOWN):
                return ids[-1]
        return next(int(i) for i in self._tokenizer.get_vocab().values() if i not in self.special)

    def _decode(self, rows: list[list[int]]) -> list[str]:
        if self._backend is not None and not getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            return list(self._backend.decode_batch(rows, skip_special_tokens=True))
        return [str(self._tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


_lexicons: WeakKeyDictionary[Any, Lexicon] = WeakKeyDictionary()


class Mirror:
    """A text that grows, in tokens of a tokenizer that did not write it.

    ``tokens`` are ``start`` and then the tokens of the text. When the text grows, its end is tokenised again from a
    place where a token ended before and still ends. Tokens before that place are kept.

    Args:
        lexicon: of the tokenizer.
        start: tokens that lead every text (the begin token, where there is one).
    """

    def __init__(self, lexicon: Lexicon, start: Sequence[int] = ()) -> None:
        self.lexicon = lexicon
        self.start = len(start)
        self.tokens: list[int] = list(start)
        self.ends: list[int] = [0] * len(start)
        """Bytes of the text before the end of each token; -1: not known."""
        self.data = bytearray()
        """The text in UTF-8, whole characters only."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A tokenizer without line breaks would drop them and join two words.
        self._spaces = {ord(c): " " for c in _SPACES if not lexicon.says(c)}

    @property
    def pending(self) -> bytes:
        """Bytes at the end that are not a whole character yet."""
        return self._decoder.getstate()[0]

    def grow(self, data: bytes) -> int:
        """Add bytes to the text.

        Returns:
            How many tokens, from the first on, are what they were.
        """
        before = len(self.data)
        self.data += self._decoder.decode(data).translate(self._spaces).encode()
        if len(self.data) == before:
            return len(self.tokens)
        if before == 0:
            return self._replace(self.start, 0, self._encode(0))
        found = self._from_border(before)
        if found is not None:
            return found
        back = _BACK
        while True:
            first = self._boundary(before - back)
            place = self.ends[first - 1] if first > self.start else 0
            fresh = self._encode(place)
            if place == 0:
                return self._replace(self.start, 0, fresh)
            # The first fresh tokens are not used: a tokenizer treats them as the beginning of a text.
            known = {end: i for i, end in enumerate(self.ends[first:], start=first) if end >= 0}
            for i, (_, end) in enumerate(zip(*fresh, strict=True)):
                if end in known and end <= before - back // 2:
                    return self._replace(known[end] + 1, i + 1, fresh)
            back *= 4

    def forget(self, tokens: int) -> None:
        """Drop about so many tokens from the beginning, with their text."""
        places = range(self.start + tokens, len(self.ends))
        place = next((i for i in places if self.ends[i] >= 0 and self._whole(self.ends[i])), None)
        if place is None:
            return
        gone = self.ends[place]
        del self.data[:gone]
        del self.tokens[self.start : place + 1]
        self.ends[self.start :] = [end - gone if end >= 0 else -1 for end in self.ends[place + 1 :]]

    def _from_border(self, before: int) -> int | None:
        """Tokenise from the last border on; None where none is near, or no known token ends there."""
        borders, ends = self.lexicon.borders, self.ends
        place = borders.last(self.data, before)
        first = len(ends)
        while first > self.start and (ends[first - 1] > place or ends[first - 1] < 0):
            first -= 1
        if not place or first == self.start or ends[first - 1] != place:
            return None
        base = place - 1
        while base and not self._whole(base):
            base -= 1
        found = borders.cut(bytes(self.data[base:]), place - base)
        if found is None:
            return None
        return self._replace(first, 0, (found[0], [base + end for end in found[1]]))

    def _whole(self, place: int) -> bool:
        """Whether a character begins at this byte; a token may end inside one."""
        return place == len(self.data) or self.data[place] & 0xC0 != 0x80

    def _boundary(self, most: int) -> int:
        """The last token that begins at a known byte, at most this one; where possible one that begins a word."""
        i = len(self.ends)
        nearest = None
        while i > self.start:
            i -= 1
            end = self.ends[i]
            if 0 < end <= most and self._whole(end):
                nearest = nearest or i + 1
                if self.data[end : end + 1].isspace():
                    return i + 1
                if most - end > _BACK:
                    break
        return nearest or self.start

    def _encode(self, place: int) -> tuple[list[int], list[int]]:
        """Tokens of the text from this byte on, and where they end."""
        data = bytes(self.data[place:])
        tokens = self.lexicon.encode(data.decode())
        return tokens, [end + place if end >= 0 else -1 for end in self.lexicon.ends(tokens, data)]

    def _replace(self, first: int, fresh: int, encoded: tuple[list[int], list[int]]) -> int:
        tokens, ends = encoded[0][fresh:], encoded[1][fresh:]
        same = first + alike(self.tokens[first:], tokens)
        self.tokens[first:] = tokens
        self.ends[first:] = ends
        return same


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens for a text that follows committed tokens.

    Attributes:
        tokens: of the text.
        ends: byte of the text at which each of them ends.
        natural: whether the tokenizer, given the whole text at once, would also end a token where the committed ones
            end. Models rarely generate other tokens than their tokenizer makes.
    """

    tokens: list[int]
    ends: list[int]
    natural: bool


def continuation(lexicon: Lexicon, before: bytes, fresh: bytes) -> Continuation:
    """Tokens for ``fresh`` behind committed tokens, as the tokenizer would make them of the whole text.

    Where the tokenizer would join the end of the committed text with what follows, the committed tokens stay, and the
    bytes up to the next token border are spelt separately.

    Args:
        lexicon: of the tokenizer.
        before: the ``tail`` of the committed tokens; some words are enough.
        fresh: the text that follows; an unfinished character at its end is left out.
    """
    data = before + fresh
    here = at = len(before)
    text = whole_characters(data)
    start = lexicon.borders.last(data, at)
    cut = lexicon.borders.cut(data if len(text) == len(data) else text.encode(), start) if start else None
    if cut is None:
        start, cut = 0, (tokens := lexicon.encode(text), lexicon.ends(tokens, data))
    natural = True
    found: list[int] = []
    places: list[int] = []
    for token, end in zip(*cut, strict=True):
        if end > at:  # else it belongs to the tail, or its end is unknown and the next token includes it
            if start == at:
                found.append(token)
                places.append(end - here)
            else:
                natural = natural and at > here
                for each in lexicon.spell(data[at:end]):
                    at += len(lexicon.pieces[each])
                    found.append(each)
                    places.append(at - here)
                if at != end:
                    break
            at = end
        start = end
    return Continuation(found, places, natural)


def whole_characters(data: bytes) -> str:
    """The text up to the first bytes that are no whole character."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
