"""Tokens by themselves: their text and their bytes, for log probabilities."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sakiyomi.core.text import profile

__all__ = ["TokenNames"]


@lru_cache
def _byte_of_letter() -> dict[str, int]:
    """The letter by which byte-level vocabularies write each byte, after GPT-2's encoder.py: printable ones stand for
    themselves, the others are numbered from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    found = {chr(value): value for value in printable}
    return found | {chr(256 + i): value for i, value in enumerate(others)}


class TokenNames:
    """Of every token the text and the bytes; a token that is part of a character has bytes only that make sense.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = profile(tokenizer).byte_of
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._letters = _byte_of_letter() if "ByteLevel" in repr(decoder) else {}
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
