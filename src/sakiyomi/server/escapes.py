r"""Matches a text token by token, with every spelling that JSON allows for a string.

A parser of llguidance knows one spelling of each character: ``é``, ``/``, ``\n``. A model may write ``\u00e9`` and
``\/`` as well. So the parser is given what the model means: each escape in a JSON string is replaced by the spelling
that it knows. Names, ``const``, ``enum``, ``pattern`` and lengths then hold for characters, as JSON Schema says.

Two parsers follow the text. The first has the grammar. The second has its outline, in which every value is any JSON
value in any spelling, and reads the text as it is written: it says where in the text a JSON string is.

Tokens have no meaning beyond their bytes: text that reads like a special token is spelled by ordinary ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

JSON_OUTLINE = r"""
json: JSON_TEXT | /-?[0-9][0-9.eE+-]*/ | "true" | "false" | "null" | json_list | json_object
json_list: "[" JSON_GAP (json (JSON_GAP "," JSON_GAP json)*)? JSON_GAP "]"
json_object: "{" JSON_GAP (json_pair (JSON_GAP "," JSON_GAP json_pair)*)? JSON_GAP "}"
json_pair: JSON_TEXT JSON_GAP ":" JSON_GAP json
JSON_GAP: /[ \n\r\t]*/
JSON_TEXT: /"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u([0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})))*"/
"""  # noqa: E501
"""Rule ``json`` of an outline: any value. A lone half of a surrogate pair is no character, and is left out."""

_HEX = b"[0-9a-fA-F]"
# A quotation mark, a whole escape, or a backslash that begins none.
_SIGN = re.compile(
    rb'"|\\(?:["\\/bfnrt]|u(?:[dD][89abAB]HH\\u[dD][c-fC-F]HH|(?![dD][89a-fA-F])HHHH))|\\'.replace(b"H", _HEX)
)
_BEGUN = re.compile(rb"\\(?:u(?:H{0,3}|[dD][89abAB]HH(?:\\(?:u(?:[dD](?:[c-fC-F]H?)?)?)?)?)?)?\Z".replace(b"H", _HEX))
_UNITS = re.compile(rb"u(H*)".replace(b"H", _HEX))
_LAST = 0x10FFFF
_LEAST = {2: 0x80, 3: 0x800, 4: 0x10000}  # of characters of so many bytes


class Vocabulary:
    """The tokens of a parser: the model's tokens, every byte, and the meanings of tokens with escapes.

    Args:
        tokens: bytes of the model's tokens, by id.
        special: ids of tokens that are no text.
        ends: ids of tokens that end a text.

    Attributes:
        parsers: llguidance's tokenizer, for new parsers.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> None:
        self.tokens, self.special, self.ends = tokens, frozenset(special), frozenset(ends)
        self._bytes = len(tokens)
        self._outline: tuple[str, LLMatcher] | None = None
        known = [*tokens, *(bytes([value]) for value in range(256))]
        ids: dict[bytes, int] = {}
        escaped = [i for i, text in enumerate(tokens) if b"\\" in text and i not in self.special]
        self.escaped: dict[bool, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[tuple[int, bytes, bytes]]]] = {}
        for inside in (False, True):
            whole: list[tuple[int, int]] = []
            begun: list[tuple[int, bytes, bytes]] = []
            for i in escaped:
                if (found := _meant(tokens[i], inside)) is None:
                    continue
                if found[1]:
                    begun.append((i, *found))
                    continue
                if found[0] not in ids:
                    ids[found[0]] = len(known)
                    known.append(found[0])
                whole.append((i, ids[found[0]]))
            table = np.array(whole, np.int64).reshape(-1, 2)
            self.escaped[inside] = table[:, 0], table[:, 1], begun
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


class _Tokens:
    """The tokenizer interface of llguidance. It would encode text that a grammar forces; ours force none."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id

    def __call__(self, _: bytes) -> list[int]:
        return []


class Matcher:
    """A place in a text that keeps to a grammar.

    Args:
        vocabulary: of the model.
        grammar: in llguidance's dialect of Lark.
        outline: the same with ``json`` for every value.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str, outline: str) -> None:
        self._vocabulary = vocabulary
        self._parser = LLMatcher(vocabulary.parsers, grammar, log_level=0)
        self._outline = vocabulary.outlined(outline)
        self._begun = b""  # of an incomplete escape
        self._steps: list[tuple[int, bytes]] = []  # per token: the parser's tokens, and the escape begun before

    def error(self) -> str:
        """Why there is no next token; "" if there is one."""
        found = self._parser.get_error() if self._parser.is_error() else ""
        return found or (self._outline.get_error() if self._outline.is_error() else "")

    def deep_copy(self) -> Matcher:
        """A copy, which continues independently."""
        other = object.__new__(Matcher)
        other._vocabulary, other._begun, other._steps = self._vocabulary, self._begun, list(self._steps)
        other._parser, other._outline = self._parser.deep_copy(), self._outline.deep_copy()
        return other

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        """Advance by these tokens; how many of them the grammar allows."""
        for count, token in enumerate(tokens):
            if not self._consume(token):
                return count
        return len(tokens)

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the grammar allows here."""
        count = self.try_consume_tokens(tokens)
        # A parser accepts no end token after a text that cannot be continued.
        ended = tokens[count : count + 1] and tokens[count] in self._vocabulary.ends and self._parser.is_accepting()
        self.rollback(count)
        return count + bool(ended)

    def rollback(self, count: int) -> None:
        """Back by so many tokens."""
        if count:
            self._parser.rollback(sum(taken for taken, _ in self._steps[-count:]))
            self._outline.rollback(count)
            self._begun = self._steps[-count][1]
            del self._steps[-count:]

    def allowed(self) -> np.ndarray[Any, Any]:
        """Mask of the allowed next tokens: (V,) bool."""
        size = len(self._vocabulary.tokens)
        mask = _bits(self._parser)
        if not self._begun and (self._parser.is_stopped() or self._in_text()):
            return mask[:size]
        shape, result = _bits(self._outline)[:size], mask[:size].copy()
        known: dict[tuple[bytes, bytes], bool] = {}
        if self._begun:
            result[:] = False
            for token in shape.nonzero()[0].tolist():
                found = _meant(self._begun + self._vocabulary.tokens[token], True)
                result[token] = found is not None and self._fits(*found, known)
            return result
        whole, meant, begun = self._vocabulary.escaped[self._in_string()]
        result[whole] = mask[meant] & shape[whole]
        for token, text, rest in begun:
            result[token] = shape[token] and self._fits(text, rest, known)
        return result

    def forced(self) -> bytes:
        """What the text continues with, whatever is chosen, up to the next special token; nothing inside an escape."""
        if self._begun:
            return b""
        # A copy: the parser would go on to what it forces, and allow no other tokens for it.
        return bytes(self._parser.deep_copy().compute_ff_bytes()).partition(b"\xff")[0]

    def _consume(self, token: int) -> bool:
        vocabulary, begun = self._vocabulary, self._begun
        text = vocabulary.tokens[token] if 0 <= token < len(vocabulary.tokens) else b""
        taken, rest = [token], b""
        plain = not begun and b"\\" not in text
        if not plain and token not in vocabulary.special and (begun or not self._in_text()):
            if (found := _meant(begun + text, bool(begun) or self._in_string())) is None:
                return False
            taken, rest = vocabulary.spelled(found[0]), found[1]
            if rest and not self._fits(*found, {}):
                return False
        elif begun:
            return False
        if (count := self._parser.try_consume_tokens(taken)) < len(taken) or not self._outline.try_consume_tokens(
            [token]
        ):
            self._parser.rollback(count)
            return False
        self._steps.append((len(taken), begun))
        self._begun = rest
        return True

    def _in_text(self) -> bool:
        """Whether a backslash is a plain character here."""
        return self._reads(self._outline, b"\\q")

    def _in_string(self) -> bool:
        return self._reads(self._outline, b"\\u0041")

    def _reads(self, parser: LLMatcher, text: bytes) -> bool:
        return bool(parser.validate_tokens(self._vocabulary.spelled(text)) == len(text))

    def _fits(self, text: bytes, begun: bytes, known: dict[tuple[bytes, bytes], bool]) -> bool:
        """Whether the text may continue with what is meant, and a begun escape may become an allowed character."""
        if not begun:
            return self._reads(self._parser, text)
        if (found := known.get((text, begun))) is None:
            # If the first digits are impossible, all of them are.
            shorter = begun[:-1]
            possible = len(shorter) <= len(self._begun) or self._fits(text, shorter, known)
            possible = possible and (not text or self._reads(self._parser, text))
            found = possible and any(self._has(text, *span) for span in _characters(begun))
            known[text, begun] = found
        return found

    def _has(self, text: bytes, first: int, last: int) -> bool:
        """Whether a character of a span may follow the text."""
        for code in range(first, min(last, 0x7F) + 1):
            if self._reads(self._parser, text + _spelling(chr(code))):
                return True
        first = max(first, 0x80)
        leads = range(_utf8(first)[0], _utf8(last)[0] + 1) if first <= last else ()
        return any(self._among(text, bytes([lead]), first, last) for lead in leads)

    def _among(self, text: bytes, head: bytes, first: int, last: int) -> bool:
        """The same of characters whose UTF-8 begins so; one of them at least is in the span."""
        if not self._reads(self._parser, text + head):
            return False
        whole = _span(head)
        low, high = max(first, whole[0]), min(last, whole[1])
        if (low, high) == whole:
            return True
        place = len(head)
        following = range(_utf8(low)[place], _utf8(high)[place] + 1)
        return any(self._among(text, head + bytes([byte]), first, last) for byte in following)


def _bits(parser: LLMatcher) -> np.ndarray[Any, Any]:
    return np.unpackbits(np.frombuffer(parser.compute_bitmask(), np.uint8), bitorder="little").astype(bool)


def _spelling(character: str) -> bytes:
    """The spelling that a parser knows."""
    return b"\\u007f" if character == "\x7f" else json.dumps(character, ensure_ascii=False)[1:-1].encode()


@lru_cache(4096)
def _character(escape: bytes) -> bytes:
    return _spelling(json.loads(b'"' + escape + b'"'))


def _meant(text: bytes, inside: bool) -> tuple[bytes, bytes] | None:
    """Text as a parser takes it, and an incomplete escape at its end; None: it has an invalid escape.

    Args:
        text: as it is written.
        inside: whether it begins in a string of JSON.
    """
    result, done = b"", 0
    for found in _SIGN.finditer(text):
        if found[0] == b'"':
            inside = not inside
        elif inside and len(found[0]) == 1:
            place = found.start()
            return (result + text[done:place], text[place:]) if _BEGUN.match(text, place) else None
        elif inside:
            result += text[done : found.start()] + _character(found[0])
            done = found.end()
    return result + text[done:], b""


def _characters(begun: bytes) -> Iterator[tuple[int, int]]:
    """Spans of code points that a begun escape may become."""
    units = [
        (int(digits or b"0", 16) << (size := 4 * (4 - len(digits))), 1 << size) for digits in _UNITS.findall(begun)
    ]
    if not units:
        yield 0, _LAST
        return
    (first, count), last = units[0], sum(units[0]) - 1
    if count == 1:  # the first half of a pair
        low, more = units[1] if len(units) > 1 else (0, 1 << 16)
        start = 0x10000 + ((first - 0xD800) << 10)
        yield start + max(low, 0xDC00) - 0xDC00, start + min(low + more - 1, 0xDFFF) - 0xDC00
        return
    for low, high in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last)):
        if low <= high:
            yield low, high
    if first <= 0xDBFF and last >= 0xD800:
        high = min(last, 0xDBFF) - 0xD800
        yield 0x10000 + ((max(first, 0xD800) - 0xD800) << 10), 0x10000 + (high << 10) + 0x3FF


def _utf8(code: int) -> bytes:
    return chr(code).encode(errors="surrogatepass")


def _span(head: bytes) -> tuple[int, int]:
    """Code points whose UTF-8 begins so."""
    size = 2 if head[0] < 0xE0 else 3 if head[0] < 0xF0 else 4
    value = head[0] & (0x7F >> size)
    for byte in head[1:]:
        value = value << 6 | byte & 0x3F
    missing = 6 * (size - len(head))
    return max(value << missing, _LEAST[size]), min((value << missing) + (1 << missing) - 1, _LAST)
