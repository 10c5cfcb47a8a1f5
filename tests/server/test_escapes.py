r"""Every spelling that JSON has for a string is legal under a schema, however tokens cut it, and no other text is."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from sakiyomi.server.escape_tables import Vocabulary
from sakiyomi.server.escapes import JSON_OUTLINE, Matcher
from sakiyomi.server.json_strings import characters, meant, span, spelling

CUT = [b"\\u", b'"\\', b"\\\\", b'\\"', b"00", b"00e", b'e9"', b"u00", b"\\ud83d", b"\\ude0", b"a\\", b"\\n\\", b"\\/b",
       b': "\\u', b"ae", b"dead", b"city", b"<|end|>", b"\\u00e9x", b"\\u0022", b'9", "']  # fmt: skip
TOKENS = [b"<|end|>", *(bytes([value]) for value in range(256)), *CUT]
VOCABULARY = Vocabulary(TOKENS, [0], [0])
HEAD = '%llguidance {"no_forcing": true}\n'


def matcher(schema: Any, vocabulary: Vocabulary = VOCABULARY) -> Matcher:
    made = Matcher(vocabulary, f"{HEAD}start: %json {json.dumps(schema)}\n", f"{HEAD}start: json\n{JSON_OUTLINE}")
    assert not made.error()
    return made


def object_of(value: Any, name: str = "a") -> dict[str, Any]:
    return {"type": "object", "properties": {name: value}, "required": [name], "additionalProperties": False}


def spelled(text: str, rng: random.Random) -> str:
    """A JSON string of the text in which every character has one of its spellings, drawn at random."""
    result = ""
    for character in text:
        units = character.encode("utf-16-be")
        long = "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
        ways = [json.dumps(character, ensure_ascii=False)[1:-1], long, long.upper().replace("\\U", "\\u")]
        result += rng.choice(ways + ["\\/"] * (character == "/"))
    return f'"{result}"'


def cut(text: bytes, rng: random.Random) -> list[int]:
    ids, place = [], 0
    while place < len(text):
        fitting = [i for i, token in enumerate(TOKENS) if i and text.startswith(token, place)]
        ids.append(rng.choice(fitting))
        place += len(TOKENS[ids[-1]])
    return ids


TEXT = 'é/東\U0001f600"\\\n\x01\x7fa <|end|>'
SCHEMAS: list[tuple[Any, list[str], list[str]]] = [  # of a string, texts that keep to it, and some that do not
    ({"type": "string"}, [TEXT, ""], []),
    ({"type": "string", "minLength": 3, "maxLength": 3}, ["é\U0001f600/", '"\\\n'], ["é\U0001f600", "abcd"]),
    ({"const": TEXT.replace("\x7f", "")}, [TEXT.replace("\x7f", "")], ["é", TEXT]),
    ({"enum": ["é", "éa", "<|end|>", "a/b"]}, ["é", "éa", "<|end|>", "a/b"], ["e", "a", "a\\/b"]),
    ({"type": "string", "pattern": "^[à-ï/]+[^a]$"}, ["éé\U0001f600", "//\n"], ["éa", "ñé", "é\U0001f600é"]),
    ({"type": "string", "format": "date"}, ["2020-01-31"], ["2020-13-31"]),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"const": "éa"}]}, ["é", "éa"], ["aa"]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_a_string_may_be_spelled_in_every_way(number: int) -> None:
    schema, right, wrong = SCHEMAS[number]
    made, rng = matcher(object_of(schema)), random.Random(number)
    for text in [*right, *wrong] * 5:
        written = f'{{"a": {spelled(text, rng)}}}'
        assert json.loads(written) == {"a": text}
        ids = [*cut(written.encode(), rng), 0]
        assert (made.validate_tokens(ids) == len(ids)) == (text in right), written


def test_names_may_be_spelled_in_every_way() -> None:
    rng = random.Random(1)
    for name in ("é", "a/b", "\U0001f600", "<|end|>"):
        made = matcher(object_of({"type": "null"}, name))
        for _ in range(5):
            ids = cut(f"{{{spelled(name, rng)}: null}}".encode(), rng)
            assert made.validate_tokens(ids) == len(ids)
    open_ = matcher({"type": "object", "properties": {"é": {"type": "null"}}, "additionalProperties": {"const": 1}})
    for written, right in (('{"\\u00e9": null}', True), ('{"\\u00e9": 1}', False), ('{"\\u00ea": 1}', True)):
        assert (open_.validate_tokens(ids := cut(written.encode(), rng)) == len(ids)) == right


@pytest.mark.parametrize("written", [
    '{"a": "\\ud83d"}', '{"a": "\\ude00"}', '{"a": "\\ud83dx"}', '{"a": "\\ud83d\\u0041"}', '{"a": "\\x41"}',
    '{"a": \\u0022b"}', '\\u007b"a": "b"}', '{"a"\\u003a "b"}', '{"a": "\\u00g0"}', '{"a": "b\\u0022}',
])  # fmt: skip
def test_what_is_no_escape_of_a_character_in_a_string_is_refused(written: str) -> None:
    """Half of a surrogate pair is legal in JSON, and no character."""
    made = matcher(object_of({"type": "string"}))
    assert made.validate_tokens(ids := [*cut(written.encode(), random.Random(0)), 0]) < len(ids)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_the_mask_is_what_the_grammar_takes(number: int) -> None:
    """At every place of a text: a token is allowed if and only if it is taken, and something may follow it."""
    schema, right, _ = SCHEMAS[number]
    made, rng = matcher(object_of(schema)), random.Random(number)
    ids = [*cut(f'{{"a": {spelled(right[0], rng)}}}'.encode(), rng), 0]
    for step, token in enumerate(ids):
        allowed = made.allowed()
        taken = np.array([made.validate_tokens([i]) == 1 for i in range(len(TOKENS))])
        assert allowed.tolist() == taken.tolist(), (step, made.deep_copy().allowed().nonzero())
        assert made.try_consume_tokens([token]) == 1 or token == 0
    made.rollback(len(ids) - 1)
    assert made.validate_tokens(ids) == len(ids)


# Many of these begin with the same end of an escape.
MORE = [*(f"{number:03}".encode() for number in range(200)), *(f"{number:02}".encode() for number in range(100)),
        *b"bad bade bee nation near never next nine no e9e9 E9 E9a A AE u00 u00e9s".split(),
        b"\\n\\n", b'a": ', b"e9\\u00", b"3d\\ude00", b'n""\\u0041', b'""\\u0041']  # fmt: skip
WIDE = Vocabulary([*TOKENS, *MORE], [0], [0])
ASKED = sorted({*map(ord, TEXT), *range(0xDF, 0xF1), *range(0x80), 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10FFFF})
STRINGS = [*(schema for schema, *_ in SCHEMAS), {"type": "string", "pattern": "^[A-Za-z ]+[^a]$"},
           {"enum": ["\ud7ff\ue000\U0010ffff", "\t", "na\nd"]}]  # fmt: skip
NAMES = {"type": "object", "additionalProperties": {"type": "string"},
         "properties": {name: {"type": "null"} for name in ("é", "na", TEXT.replace("\x7f", ""))}}  # fmt: skip
OPEN: list[Any] = [
    {},
    {"type": "string"},
    NAMES,
    {**NAMES, "additionalProperties": False},
    {"type": "array", "items": {"type": "string"}},
]


def in_calls(value: str, letters: str) -> str:
    return f'{HEAD}start: TEXT ("<call>" {value} TEXT)*\nTEXT: /{letters}*/\n'


def may_follow(made: Matcher, token: int) -> bool:
    """Whether this token is allowed, by the parsers' answers about one text after another."""

    def reads(parser: Any, text: bytes) -> bool:
        return bool(parser.validate_tokens(WIDE.spelled(text)) == len(text))

    parser, outline, begun = made._parser, made._outline, made._begun
    if token == 0:
        return not begun and bool(parser.is_accepting())
    text = WIDE.tokens[token]
    if not begun and reads(outline, b"\\q"):
        return reads(parser, text)
    found = meant(begun + text, bool(begun) or reads(outline, b"\\u0041"))
    if found is None or not reads(outline, text) or not reads(parser, found[0]):
        return False
    spans = [range(first, last + 1) for first, last in characters(found[1])] if found[1] else []
    asked = {code for span in spans for code in (*span[:: 1 + len(span) // 64], *ASKED) if code in span}
    return not spans or any(reads(parser, found[0] + spelling(chr(code))) for code in asked)


@pytest.mark.parametrize("number", range(3 * (len(STRINGS) + len(OPEN))))
def test_masks_along_random_walks_are_what_the_parsers_answer_about_single_texts(number: int) -> None:
    """In JSON alone, and in the calls of a text, which may have backslashes or not; a mask of bits is the same mask."""
    rng = random.Random(number)
    schema = [*map(object_of, STRINGS), *OPEN][number // 3]
    value = f"%json {json.dumps(schema)}"
    if kind := number % 3:
        letters = ("[^<]", r"[^<\\]")[kind - 1]
        made = Matcher(WIDE, in_calls(value, letters), in_calls("json", letters) + JSON_OUTLINE)
        assert made.try_consume_tokens(ids := cut(b"a <call>", rng)) == len(ids)
    else:
        made = matcher(schema, WIDE)
    start = '{"a": "' if number // 3 < len(STRINGS) else '{"' if "properties" in schema else ""
    assert made.try_consume_tokens(ids := cut(start.encode(), rng)) == len(ids)
    path: list[bytes] = []
    for _ in range(40):
        allowed, bits = made.allowed(), made.bits()
        expected = [may_follow(made, token) for token in range(len(WIDE.tokens))]
        assert allowed.tolist() == expected, path
        assert bits.dtype == np.uint32 and len(bits) == -(-len(allowed) // 32)
        whole = np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool)
        assert whole.nonzero()[0].tolist() == allowed.nonzero()[0].tolist()
        may = [i for i in allowed.nonzero()[0].tolist() if i]
        if not may or rng.random() < 0.1:
            back = rng.randint(0, len(path))
            made.rollback(back)
            del path[len(path) - back :]
            continue
        signs = [i for i in may if b"\\" in WIDE.tokens[i] or made._begun or b'"' in WIDE.tokens[i]]
        path.append(WIDE.tokens[token := rng.choice(signs if signs and rng.random() < 0.6 else may)])
        assert made.try_consume_tokens([token]) == 1


def test_the_mask_behind_a_begun_escape_looks_at_few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies have a thousand numbers of three digits: each is an escape that one digit makes a character."""
    numbers = [f"{number:03}".encode() for number in range(1000)]
    vocabulary = Vocabulary([*TOKENS, *numbers], [0], [0])
    looks = 0

    def counted(head: bytes) -> tuple[int, int]:
        nonlocal looks
        looks += 1
        return span(head)

    monkeypatch.setattr("sakiyomi.server.escapes.span", counted)
    made = matcher({"type": "string"}, vocabulary)
    assert made.try_consume_tokens([1 + ord('"'), TOKENS.index(b"\\u")]) == 2
    assert made.allowed()[len(TOKENS) :].all() and looks < 5000


def test_in_text_that_is_no_json_an_escape_is_its_letters() -> None:
    def lark(value: str) -> str:
        return f'{HEAD}start: TEXT "<call>" {value}\nTEXT: /[^<]*/\n'

    made = Matcher(VOCABULARY, lark('%json {"const": "é"}'), lark("json") + JSON_OUTLINE)
    for written, right in (('a "\\u00e9\\q<call>"\\u00e9"', True), ('"<call>"é"', True), ('\\u003ccall>"é"', False)):
        for seed in range(5):
            ids = [*cut(written.encode(), random.Random(seed)), 0]
            assert (made.validate_tokens(ids) == len(ids)) == right, written
