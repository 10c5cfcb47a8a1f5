"""Tokens by themselves: their text and their bytes, for log probabilities."""

from __future__ import annotations

from typing import Any

from sakiyomi.core.text import profile

__all__ = ["TokenNames"]


class TokenNames:
    """Of every token the text and the bytes; a token that is part of a character has bytes only that make sense.

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
        name = self._tokenizer.convert_ids_to_tokens(token)
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        if isinstance(name, str) and token not in added:
            if self._letters and all(letter in self._letters for letter in name):
                return bytes(self._letters[letter] for letter in name)
            if name.startswith("▁"):
                return name.replace("▁", " ").encode()
        return str(self._tokenizer.decode([token])).encode()
