r"""Characters of JSON strings and their spellings: ``é`` is ``\u00e9`` as well."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache

_HEX = b"[0-9a-fA-F]"
_ESCAPE = rb'\\(?:["\\/bfnrt]|u(?:[dD][89abAB]HH\\u[dD][c-fC-F]HH|(?![dD][89a-fA-F])HHHH))'.replace(b"H", _HEX)
WHOLE = re.compile(_ESCAPE)
_SIGN = re.compile(rb'"|' + _ESCAPE + rb"|\\")  # the last is a backslash that begins no escape
BEGUN = re.compile(rb"\\(?:u(?:H{0,3}|[dD][89abAB]HH(?:\\(?:u(?:[dD](?:[c-fC-F]H?)?)?)?)?)?)?\Z".replace(b"H", _HEX))
_UNITS = re.compile(rb"u(H*)".replace(b"H", _HEX))
_LAST = 0x10FFFF
_LEAST = {2: 0x80, 3: 0x800, 4: 0x10000}  # of characters of so many bytes


def spelling(character: str) -> bytes:
    """The spelling that a parser knows."""
    return b"\\u007f" if character == "\x7f" else json.dumps(character, ensure_ascii=False)[1:-1].encode()


@lru_cache(4096)
def character(escape: bytes) -> bytes:
    """What an escape means, as a parser knows it."""
    return spelling(json.loads(b'"' + escape + b'"'))


def meant(text: bytes, inside: bool) -> tuple[bytes, bytes] | None:
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
            return (result + text[done:place], text[place:]) if BEGUN.match(text, place) else None
        elif inside:
            result += text[done : found.start()] + character(found[0])
            done = found.end()
    return result + text[done:], b""


def characters(begun: bytes) -> Iterator[tuple[int, int]]:
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


def utf8(code: int) -> bytes:
    """A code point's UTF-8."""
    return chr(code).encode(errors="surrogatepass")


def span(head: bytes) -> tuple[int, int]:
    """Code points whose UTF-8 begins so."""
    size = 2 if head[0] < 0xE0 else 3 if head[0] < 0xF0 else 4
    value = head[0] & (0x7F >> size)
    for byte in head[1:]:
        value = value << 6 | byte & 0x3F
    missing = 6 * (size - len(head))
    return max(value << missing, _LEAST[size]), min((value << missing) + (1 << missing) - 1, _LAST)
