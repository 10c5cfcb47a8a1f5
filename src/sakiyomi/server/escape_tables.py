"""A model's tokens as a parser of JSON takes them. Tables are made once, so that a mask needs few questions.

A token may begin with the end of an escape, and end with the beginning of another. The tables say what each token
means behind every beginning. Parsers know some texts as tokens of their own, so that one mask answers for all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from sakiyomi.server.json_strings import BEGUN, WHOLE, character, characters, meant, spelling

_HEX = b"[0-9a-fA-F]"
# What a token may begin with that ends an escape, and all of a token that continues one. Some fit no escape.
_END = re.compile(rb"u?H{1,4}|u?H{0,4}\\uH{4}".replace(b"H", _HEX))
_MIDDLE = re.compile(rb"u?H{0,4}(?:\\(?:uH{0,3})?)?".replace(b"H", _HEX))
_LETTERS = frozenset(bytes([value]) for value in b'"\\/bfnrt')
_STARTS = _LETTERS | frozenset(bytes([value]) for value in b"u0123456789acdeABCDEF")
_LONGEST = 11  # bytes of an escape behind its backslash
_KEPT = 256  # tables of begun escapes; one is some 10 to 200 KB

Mask = np.ndarray[Any, np.dtype[np.uint8]]  # a bit for each token, the lowest of a byte first
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Ids = np.ndarray[Any, np.dtype[np.int64]]
Meant = tuple[int, bytes, bytes]  # a token, the text that it means, and the escape begun at its end
Known = Callable[[bytes], int]  # the parser's token for a text


class Places:
    """Where some tokens have their bits in a mask."""

    def __init__(self, tokens: Sequence[int]) -> None:
        ids = np.array(tokens, np.int64)
        self._bytes, self._bits = ids >> 3, np.left_shift(1, ids & 7).astype(np.uint8)

    def of(self, mask: Mask) -> Flags:
        """Which of the tokens a mask has: (n,)."""
        found: Flags = (mask[self._bytes] & self._bits) != 0
        return found

    def add(self, mask: Mask, chosen: Flags) -> None:
        """Put those of the tokens into a mask, in place."""
        np.bitwise_or.at(mask, self._bytes[chosen], self._bits[chosen])


class Escaped:
    """Tokens with a backslash, where no escape is begun.

    Attributes:
        tokens: those that may be allowed.
        texts, samples: the parser's tokens for what each of them means; in a sample, a begun escape at its end is some
            character. Where the sample is allowed, the token is.
        empty: (n,) bool, of tokens that are nothing but a begun escape: they have no text.
        meanings: text and begun escape of each.
    """

    def __init__(self, found: Sequence[Meant], known: Known) -> None:
        samples = [(token, text, rest, _sample(rest)) for token, text, rest in found]
        taken = [(token, text, rest, text + more) for token, text, rest, more in samples if more is not None]
        self.tokens = Places([token for token, *_ in taken])
        self.texts = Places([known(text or sample) for _, text, _, sample in taken])
        self.samples = Places([known(sample) for *_, sample in taken])
        self.empty = np.array([not text for _, text, *_ in taken], bool)
        self.meanings = [(text, rest) for _, text, rest, _ in taken]


class Ended:
    """Tokens that begin with the same end of an escape.

    Attributes:
        alone: (n,) tokens that are nothing else.
        tokens, following: (n,) the others, and the parser's tokens for what each of them means behind the escape.
        places: of ``following``.
        begun: tokens that end with a begun escape, with the text before it.
    """

    def __init__(self, found: Sequence[Meant], known: Known) -> None:
        self.alone: Ids = np.array([token for token, text, rest in found if not text and not rest], np.int64)
        more = [(token, known(text)) for token, text, rest in found if text and not rest]
        self.tokens: Ids = np.array([token for token, _ in more], np.int64)
        self.following = [text for _, text in more]
        self.places = Places(self.following)
        self.begun = [(token, text, rest) for token, text, rest in found if rest]


# Tokens that leave an escape incomplete, with what is begun then and a character that it may become; and those that end
# it, with its character. Characters are as the parser's tokens.
Continued = tuple[list[tuple[bytes, list[int], Ids]], list[tuple[bytes, list[int], Ended]]]


class Vocabulary:
    """The tokens of a parser: the model's tokens, every byte, and texts that tokens mean.

    Args:
        tokens: bytes of the model's tokens, by id.
        special: ids of tokens that are no text.
        ends: ids of tokens that end a text.

    Attributes:
        parsers: llguidance's tokenizer, for new parsers.
        all, plain: masks of the model's tokens, in whole words of 32 bits: all of them, and those without a backslash,
            which a parser takes as they are.
        escaped: the others, as they are meant outside and inside a string.
        many: so many checks of single tokens take as long as a mask.
        backslash, escape: a backslash that is no escape, and one that is, as the parser's tokens.
        first: the parser's tokens that a text may go on with: each ASCII character, then each byte from 0x80 on.
        continued: what may follow a begun escape.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> None:
        self.tokens, self.special, self.ends = tokens, frozenset(special), frozenset(ends)
        self._bytes = len(tokens)
        known = [*tokens, *(bytes([value]) for value in range(256))]
        ids = {text: i for i, text in enumerate(known) if i not in self.special and i not in self.ends}

        def id_of(text: bytes) -> int:
            if text not in ids:
                ids[text] = len(known)
                known.append(text)
            return ids[text]

        self.all = self._mask(range(len(tokens)))
        escaped = [i for i, text in enumerate(tokens) if b"\\" in text and i not in self.special]
        self.plain = self.all & ~self._mask(escaped)
        self.escaped = {
            inside: Escaped([(i, *told) for i in escaped if (told := meant(tokens[i], inside))], id_of)
            for inside in (False, True)
        }
        self.first = Places([id_of(spelling(chr(code)) if code < 0x80 else bytes([code])) for code in range(256)])
        self._middles, ended = self._parts()
        self._ended = {
            size: {end: Ended(found, id_of) for end, found in ends_of.items()} for size, ends_of in ended.items()
        }
        self.many = len(known) // 4096 + 4
        self.backslash, self.escape = self.spelled(b"\\q"), self.spelled(b"\\u0041")
        self.continued = lru_cache(_KEPT)(self._continued)
        self._outline: tuple[str, LLMatcher] | None = None
        self.parsers = LLTokenizer(TokenizerWrapper(_Tokens(known, sorted(self.special), ends[0])), eos_token=[*ends])

    def outlined(self, grammar: str) -> LLMatcher:
        """A parser of an outline. Many grammars have the same: the last one is kept, and copied."""
        known = self._outline
        if known is None or known[0] != grammar:
            known = self._outline = grammar, LLMatcher(self.parsers, grammar, log_level=0)
        return known[1].deep_copy()

    def spelled(self, text: bytes) -> list[int]:
        """The parser's tokens for some bytes."""
        return [self._bytes + value for value in text]

    def _mask(self, tokens: Sequence[int]) -> Mask:
        flags = np.zeros(-(-len(self.tokens) // 32) * 32, bool)
        flags[np.array(tokens, np.int64)] = True
        return np.packbits(flags, bitorder="little")

    def _parts(self) -> tuple[dict[bytes, Ids], dict[int, dict[bytes, list[Meant]]]]:
        """Tokens that may continue an escape, by text, and those that may end one, by the end's length and text.

        Digits are in lower case. What follows a backslash directly has length 0: there, ``B`` is no ``b``.
        """
        middles: dict[bytes, list[int]] = defaultdict(list)
        ended: dict[int, dict[bytes, list[Meant]]] = defaultdict(lambda: defaultdict(list))
        for token, text in enumerate(self.tokens):
            if token in self.special or text[:1] not in _STARTS:
                continue
            if _MIDDLE.fullmatch(text):
                middles[text.lower()].append(token)
            for size in range(min(len(text), _LONGEST) + 1):
                end = text[: size or 1]
                if (_END.fullmatch(end) if size else end in _LETTERS) and (told := meant(text[len(end) :], True)):
                    ended[size][end.lower()].append((token, *told))
        return {text: np.array(found, np.int64) for text, found in middles.items()}, ended

    def _continued(self, begun: bytes) -> Continued:
        sizes = [6 - len(begun), 12 - len(begun)] + [0] * (begun == b"\\")
        ended = [
            (text := character(begun + end), self.spelled(text), found)
            for size in sizes
            for end, found in self._ended.get(size, {}).items()
            if WHOLE.fullmatch(begun + end)
        ]
        longer = [
            (begun + text, self.spelled(sample), found)
            for text, found in sorted(self._middles.items(), key=lambda item: len(item[0]))
            if BEGUN.fullmatch(begun + text) and (sample := _sample(begun + text))
        ]
        return longer, ended


class _Tokens:
    """The tokenizer interface of llguidance. It would encode text that a grammar forces; ours force none."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id

    def __call__(self, _: bytes) -> list[int]:
        return []


def _sample(begun: bytes) -> bytes | None:
    """Some character that an escape may become, as a parser knows it; None if there is none."""
    if not begun:
        return b""
    for first, last in characters(begun):
        return spelling("a" if first <= ord("a") <= last else chr(last))
    return None
