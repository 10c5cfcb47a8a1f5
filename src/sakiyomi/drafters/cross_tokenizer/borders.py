"""Borders at which a tokenizer always cuts a text, and a cache of the tokens of the parts between them.

Two bytes that are neighbours in no token of the vocabulary are never joined: merges (BPE) and best paths (unigram) on
one side of such a border do not depend on the other side. The part between two borders, usually a word, is therefore
tokenised alone, and its tokens are cached: a call of the tokenizer is much slower than a look-up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

Cut = tuple[list[int], list[int]]
"""Tokens, and where each of them ends in the text; -1 where that is unknown."""

_SPACES = b" \t\n\r\v\f"
_FAR = 64  # bytes that are searched for a border
_LONGEST = 48  # bytes of the longest part that is cached; longer ones rarely come again
_MOST = 1 << 15  # parts in the cache
_SAMPLE = "\"It's 12.5 (or 7), isn't it?\"  The fox-hunters went on;\n\nthe END. 山へ行った。 naïve 😀 x_y=z/2"
"""Every tokenizer is tested on those characters of this text that it has."""
_ENOUGH = 12  # characters that it has to know


class Borders:
    """Tokenises from a border on, part by part.

    Args:
        pieces: bytes of every token; empty where they are not known.
        encode: tokens of a text, and where they end in its bytes.
    """

    def __init__(self, pieces: Iterable[bytes], encode: Callable[[str], Cut]) -> None:
        self._encode = encode
        self._known: dict[bytes, Cut] = {}
        self._free = bytearray(b"\x01" * 65536)  # by two bytes: no token has both
        said = set(pieces)
        for piece in said:
            for left, right in itertools.pairwise(piece):
                self._free[left << 8 | right] = 0
        self._apart = bytes(self._free)
        for space in _SPACES:  # how a run of spaces is cut may depend on what follows it
            self._free[space << 8 : (space + 1) << 8] = bytes(256)
        for left in range(256):  # no character is cut
            self._free[left << 8 | 0x80 : (left << 8 | 0xBF) + 1] = bytes(64)
        if not self._holds("".join(c for c in _SAMPLE if c.encode() in said)):
            self._free = bytearray(65536)  # this tokenizer follows other rules: no borders

    def apart(self, left: int, right: int) -> bool:
        """Whether no token has these two bytes as neighbours."""
        return bool(self._apart[left << 8 | right])

    def last(self, data: bytes | bytearray, most: int) -> int:
        """The last border at or before this place, not far from it; 0: there is none."""
        free, place = self._free, min(most, len(data) - 1)
        least = max(0, place - _FAR)
        while place > least:
            if free[data[place - 1] << 8 | data[place]]:
                return place
            place -= 1
        return 0

    def cut(self, data: bytes, place: int) -> Cut | None:
        """Tokens of a text from a border on, and where they end in it; None: it cannot be tokenised part by part.

        Args:
            data: whole characters.
            place: of the border, not 0: a tokenizer may take the beginning of a text for something else.
        """
        tokens: list[int] = []
        ends: list[int] = []
        free, known, size = self._free, self._known, len(data)
        start = place
        while start < size:
            end = start + 1
            while end < size and not free[data[end - 1] << 8 | data[end]]:
                end += 1
            part = data[start:end]
            found = known.get(part) or self._part(data, start, part)
            if found is None:
                return None
            tokens += found[0]
            ends += [start + each for each in found[1]]
            start = end
        return tokens, ends

    def _holds(self, sample: str) -> bool:
        """Whether the parts of a text give the same tokens as the text as a whole."""
        data = sample.encode()
        border = next((i for i in range(1, len(data)) if self._free[data[i - 1] << 8 | data[i]]), 0)
        tokens, ends = self._encode(sample)
        if len(sample) < _ENOUGH or not border or border not in ends:
            return False
        alone = self.cut(data, border)
        return alone is not None and alone[0] == tokens[ends.index(border) + 1 :]

    def _part(self, data: bytes, start: int, part: bytes) -> Cut | None:
        """A part that is not in the cache, tokenised after the character before it."""
        begin = start - 1
        while begin and data[begin] & 0xC0 == 0x80:
            begin -= 1
        before = start - begin
        tokens, ends = self._encode(data[begin : start + len(part)].decode())
        if before not in ends or ends[-1] != before + len(part) or -1 in ends:
            return None
        first = ends.index(before) + 1
        found = tokens[first:], [end - before for end in ends[first:]]
        if len(part) <= _LONGEST:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[part] = found
        return found
