r"""Every spelling that JSON has for a string is legal under a schema, however tokens cut it, and no other text is."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from sakiyomi.server.escapes import JSON_OUTLINE, Matcher, Vocabulary, _span

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


def test_the_mask_behind_a_begun_escape_looks_at_few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies have a thousand numbers of three digits: each is an escape that one digit makes a character."""
    numbers = [f"{number:03}".encode() for number in range(1000)]
    vocabulary = Vocabulary([*TOKENS, *numbers], [0], [0])
    looks = 0

    def span(head: bytes) -> tuple[int, int]:
        nonlocal looks
        looks += 1
        return _span(head)

    monkeypatch.setattr("sakiyomi.server.escapes._span", span)
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
