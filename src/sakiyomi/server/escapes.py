r"""Matches a text token by token, with every spelling that JSON allows for a string.

A parser of llguidance knows one spelling of each character: ``é``, ``/``, ``\n``. A model may write ``\u00e9`` and
``\/`` as well. So the parser is given what the model means: each escape in a JSON string is replaced by the spelling
that it knows. Names, ``const``, ``enum``, ``pattern`` and lengths then hold for characters, as JSON Schema says.

Two parsers follow the text. The first has the grammar. The second has its outline, in which every value is any JSON
value in any spelling, and reads the text as it is written: it says where in the text a JSON string is.

Tokens have no meaning beyond their bytes: text that reads like a special token is spelled by ordinary ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher

from sakiyomi.server.escape_tables import Flags, Mask, Vocabulary
from sakiyomi.server.json_strings import characters, meant, span, utf8

JSON_OUTLINE = r"""
json: JSON_TEXT | /-?[0-9][0-9.eE+-]*/ | "true" | "false" | "null" | json_list | json_object
json_list: "[" JSON_GAP (json (JSON_GAP "," JSON_GAP json)*)? JSON_GAP "]"
json_object: "{" JSON_GAP (json_pair (JSON_GAP "," JSON_GAP json_pair)*)? JSON_GAP "}"
json_pair: JSON_TEXT JSON_GAP ":" JSON_GAP json
JSON_GAP: /[ \n\r\t]*/
JSON_TEXT: /"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u([0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})))*"/
"""  # noqa: E501
"""Rule ``json`` of an outline: any value. A lone half of a surrogate pair is no character, and is left out."""


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

    def allowed(self) -> Flags:
        """Mask of the allowed next tokens: (V,) bool."""
        size = len(self._vocabulary.tokens)
        return np.unpackbits(self.bits().view(np.uint8), count=size, bitorder="little").view(bool)

    def bits(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The same mask, packed: (ceil(V / 32),) uint32, a new array.

        A token's bit is bit ``token % 32`` of word ``token // 32``, as in llguidance's masks. Bits from V on are 0.
        """
        vocabulary = self._vocabulary
        if self._begun:
            result = self._behind_begun()
        elif self._parser.is_stopped() or self._in_text():
            result = _bits(self._parser)[: len(vocabulary.all)] & vocabulary.all
        else:
            result = self._corrected(_bits(self._parser))
        return result.view(np.uint32)

    def _corrected(self, mask: Mask) -> Mask:
        """The parser's mask with the tokens that have escapes; none is begun."""
        plain, escaped = self._vocabulary.plain, self._vocabulary.escaped[self._in_string()]
        result, found = mask[: len(plain)] & plain, escaped.samples.of(mask)
        possible = found | escaped.empty | escaped.texts.of(mask)
        if not possible.any():
            return result
        possible &= escaped.tokens.of(_bits(self._outline))
        firsts: dict[bytes, bytes] = {}
        for place in (possible & ~found).nonzero()[0].tolist():
            text, begun = escaped.meanings[place]
            found[place] = self._fits(text, begun, firsts)
        escaped.tokens.add(result, found & possible)
        return result

    def _behind_begun(self) -> Mask:
        """The mask behind a begun escape."""
        vocabulary, parser = self._vocabulary, self._parser
        allowed = np.zeros(8 * len(vocabulary.all), bool)
        firsts: dict[bytes, bytes] = {}
        refused = set()
        longer, ended = vocabulary.continued(self._begun)
        for begun, sample, tokens in longer:
            # If the first digits are impossible, all of them are.
            if begun[:-1] not in refused and (
                parser.validate_tokens(sample) == len(sample) or self._fits(b"", begun, firsts)
            ):
                allowed[tokens] = True
            else:
                refused.add(begun)
        for text, spelled, found in ended:
            if parser.validate_tokens(spelled) < len(spelled):
                continue
            allowed[found.alone] = True
            if len(found.tokens) > vocabulary.many:
                parser.try_consume_tokens(spelled)
                allowed[found.tokens] = found.places.of(_bits(parser))
                parser.rollback(len(spelled))
            else:
                for token, following in zip(found.tokens.tolist(), found.following, strict=True):
                    allowed[token] = parser.validate_tokens([*spelled, following]) > len(spelled)
            for token, more, begun in found.begun:
                allowed[token] = self._fits(text + more, begun, firsts)
        return np.packbits(allowed, bitorder="little") & _bits(self._outline)[: len(vocabulary.all)]

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
            if (found := meant(begun + text, bool(begun) or self._in_string())) is None:
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
        spelled = self._vocabulary.backslash
        return self._outline.validate_tokens(spelled) == len(spelled)

    def _in_string(self) -> bool:
        spelled = self._vocabulary.escape
        return self._outline.validate_tokens(spelled) == len(spelled)

    def _reads(self, text: bytes) -> bool:
        return self._parser.validate_tokens(self._vocabulary.spelled(text)) == len(text)

    def _fits(self, text: bytes, begun: bytes, firsts: dict[bytes, bytes]) -> bool:
        """Whether the text may continue with what is meant, and a begun escape may become an allowed character.

        Args:
            firsts: what may follow each text that was asked about, per ASCII character and byte.
        """
        if (first := firsts.get(text)) is None:
            first = firsts[text] = self._first(text)
        return bool(first) and any(self._has(text, first, *span) for span in characters(begun))

    def _first(self, text: bytes) -> bytes:
        """A flag for each ASCII character that may follow a text, and for each byte from 0x80 on; b"" if none may."""
        spelled = self._vocabulary.spelled(text)
        taken = self._parser.try_consume_tokens(spelled)
        found = self._vocabulary.first.of(_bits(self._parser)).tobytes() if taken == len(spelled) else b""
        self._parser.rollback(taken)
        return found

    def _has(self, text: bytes, follow: bytes, first: int, last: int) -> bool:
        """Whether a character of a span may follow the text."""
        if follow.find(1, first, min(last, 0x7F) + 1) >= 0:
            return True
        first = max(first, 0x80)
        leads = range(utf8(first)[0], utf8(last)[0] + 1) if first <= last else ()
        return any(follow[lead] and self._among(text, bytes([lead]), first, last) for lead in leads)

    def _among(self, text: bytes, head: bytes, first: int, last: int) -> bool:
        """The same of characters whose UTF-8 begins so, as one may; one of them at least is in the span."""
        whole = span(head)
        low, high = max(first, whole[0]), min(last, whole[1])
        if (low, high) == whole:
            return True
        place = len(head)
        heads = (head + bytes([byte]) for byte in range(utf8(low)[place], utf8(high)[place] + 1))
        return any(self._reads(text + longer) and self._among(text, longer, first, last) for longer in heads)


def _bits(parser: LLMatcher) -> Mask:
    return np.frombuffer(parser.compute_bitmask(), np.uint8)
