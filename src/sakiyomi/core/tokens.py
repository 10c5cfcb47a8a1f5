"""Tokens one by one: the text and the bytes of each, and where in a text it begins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sakiyomi.core.text import TextStream, profile

_SPACES = re.compile(r"\s*")


class TokenNames:
    """Text and bytes of each token. For a token that is part of a character only the bytes are meaningful.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._bytes = profile(tokenizer).byte_of
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        # Letters by which byte-level vocabularies write each byte.
        letters = bytes_to_unicode() if "ByteLevel" in repr(decoder) else {}
        self._letters = {letter: value for value, letter in letters.items()}
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """Text, with replacement characters for what is none, and bytes."""
        found = self._known.get(token)
        if found is None:
            data = self._data(token)
            found = self._known[token] = data.decode(errors="replace"), data
        return found

    def _data(self, token: int) -> bytes:
        if token in self._bytes:
            return bytes([self._bytes[token]])
        name, text = self._tokenizer.convert_ids_to_tokens(token), str(self._tokenizer.decode([token]))
        if not isinstance(name, str):
            return text.encode()
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        if self._letters and token not in added and all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        spaced = name.replace("▁", " ")
        # Decoded alone, a token of SentencePiece loses its first space.
        return (spaced if text == spaced.removeprefix(" ") else text).encode()


def token_places(tokens: Sequence[int], text: str, tokenizer: Any) -> list[int]:
    """Where in a prompt's text each of its tokens begins.

    A token that is part of a character begins where the character does. A special token has the length that it has in
    the text, where it may stand by name or not at all.

    Args:
        tokens: of the prompt.
        text: of it, as it was given or as the tokenizer decodes the tokens.
        tokenizer: a transformers tokenizer.
    """
    special, stream = profile(tokenizer).special, TextStream(tokenizer)
    found: list[int] = []
    place, counted = 0, ""  # what of the stream's text is counted before it is given
    for token in tokens:
        found.append(place)
        if token in special:
            place += len(special[token]) if text.startswith(special[token], place) else 0
            continue
        new, _ = stream.push([token])
        awaited = stream.awaited
        place = _behind(text, place, (new + awaited)[len(counted) :])
        counted = awaited
    return found


def _behind(text: str, place: int, piece: str) -> int:
    """Where in a text this piece of it ends, which begins here; spaces between pieces may be other ones."""
    if not piece or text.startswith(piece, place):
        return place + len(piece)
    bare, spaces = piece.lstrip(), _SPACES.match(text, place)
    begin = place if spaces is None else spaces.end()
    if bare and text.startswith(bare, begin):
        return begin + len(bare)
    return min(place + len(piece), len(text))
