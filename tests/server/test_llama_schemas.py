"""The schemas of llama.cpp's tests: what keeps to one is taken, and nothing else; or it is refused by a clear error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice, product
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from llama_answers import read_schemas
from real_files import real
from sakiyomi.server.errors import ApiError
from sakiyomi.server.escapes import Matcher
from sakiyomi.server.fields import resolved
from sakiyomi.server.grammar import Grammars
from sakiyomi.server.notations import Inline, Pairs
from sakiyomi.server.schema import FunctionTool
from sakiyomi.server.tools import ToolFormat, ToolReader
from server_toys import marked_tokenizer

VALUES = (
    None, True, 0, 1, -1, 7, 42, -0.5, 2.5, "", "a", "foo", "2026-11-28", "12:30:00Z", 'q"\\\n', [], [1], ["a"],
    {}, {"a": 1}, {"b": "x"},
)  # fmt: skip
"""Tried against every schema."""
MOST = 24
CLOSING = ('"', "}", "]", "'", "</p>", '<|"|>', "</a>", "a", "1")
"""Written now and then, so that texts by chance end."""


def samples(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Any]:
    """Values of which some keep to the schema and others do not."""
    schema = resolved(schema, root)
    found: list[Any] = list(VALUES) if not depth else ["x", 1, 2.5, None]
    if not isinstance(schema, Mapping) or depth > 3:
        return found
    found = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ()), *found]
    for bound in ("minimum", "maximum"):
        if bound in schema:
            found += [schema[bound] + step for step in (-1000, -100, -10, -1, -0.5, 0, 1, 9, 10, 100, 1000)]
    lengths = [schema[name] for name in ("minLength", "maxLength") if name in schema]
    found += ["é" * max(0, length + step) for length in lengths for step in (-1, 0, 1)]
    found += _matching(schema["pattern"]) if "pattern" in schema else []
    for word in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(word, ()):
            found += samples(each, root, depth + 1)[:MOST]
    found += islice(_arrays(schema, root, depth), MOST)
    return [*found, *islice(_objects(schema, root, depth), 4 * MOST)]


def _matching(pattern: str) -> list[str]:
    """Texts that a pattern may take, and ones with a change."""
    plain = re.sub(r"\\(.)", r"\1", re.sub(r"\(\?[:=]|[()^$]|[?*+]|\{[\d,]+\}", "", pattern))
    texts = [
        plain, "abcdefgkl", "abdeffghijkl", "[]{}()|+*?", "555-1234 aaand...", "(123)555-1234 aaaaandxyz", "A", "xB",
        "D", "foobaz", "barbaz", "ababcd", "abd", "d", "abcd", "12", "x7y", "123x", "1234", "123é", "a-z", "ab", "a-b",
        '"', "a",
    ]  # fmt: skip
    return texts + [text + "!" for text in texts] + ["!" + text for text in texts]


def _arrays(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[list[Any]]:
    item, first = schema.get("items", {}), schema.get("prefixItems", [])
    some = samples(item, root, depth + 1)[:MOST]
    longest = schema.get("maxItems", schema.get("minItems", 2)) + 1
    for length in range(longest + 1):
        kinds = [samples(each, root, depth + 1)[:12] for each in first][:length]
        for values in islice(product(*kinds, *([some] * (length - len(kinds)))), MOST // 2):
            yield [*values]
        for value in some:
            yield [value] * length


def _objects(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Objects whose fields are in the schema's order, as the grammar wants them; others are last."""
    names = [*schema.get("properties", {})]
    values = {name: samples(schema["properties"][name], root, depth + 1)[:8] for name in names}
    more = [{}, {"zz": "x"}, {"zz": 1}, {"zz": [1]}, {"aaa": 1}]
    for chosen in product([True, False], repeat=len(names)):
        kept = [name for name, wanted in zip(names, chosen, strict=True) if wanted]
        for some in islice(product(*(values[name] for name in kept)), 24):
            for other in more:
                yield dict(zip(kept, some, strict=True)) | other


@cache
def tokenizer() -> Any:
    return marked_tokenizer([])


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), 320, [0])


def validator_of(schema: Any) -> Any:
    """Lists of items are those of older drafts."""
    old = '"items": [' in json.dumps(schema)
    made = jsonschema_rs.Draft201909Validator if old else jsonschema_rs.validator_for
    return made(schema, validate_formats=True)


def takes(matcher: Matcher, value: Any) -> bool:
    ids = tokenizer()(json.dumps(value, ensure_ascii=False))["input_ids"]
    return bool(matcher.validate_tokens([*ids, 0]) == len(ids) + 1)


def written(matcher: Matcher, random: Random, most: int = 300) -> str | None:
    """A text by the grammar, with tokens by chance; None: it is not over after this many."""
    fresh, ids = matcher.deep_copy(), list[int]()
    while len(ids) < most:
        allowed = fresh.allowed().nonzero()[0].tolist()
        if 0 in allowed and (len(allowed) == 1 or random.random() < 0.3):
            text = str(tokenizer().decode(ids))
            return None if "\ufffd" in text else text
        tokens = list(tokenizer()(random.choice(CLOSING))["input_ids"]) if random.random() < 0.7 else []
        if not tokens or (count := fresh.try_consume_tokens(tokens)) < len(tokens):
            fresh.rollback(count if tokens else 0)
            tokens = [random.choice([token for token in allowed if token])]
            if not fresh.try_consume_tokens(tokens):  # the mask is wider than the grammar in a few places
                return None
        ids += tokens
    return None


def is_finite(value: Any) -> bool:
    """Whether Python has its numbers: JSON has larger ones."""
    return "Infinity" not in json.dumps(value)


@pytest.mark.thorough
def test_schemas_are_kept_to_or_refused_clearly() -> None:
    """What is accepted, of values by hand, and what is written by chance, are what a validator accepts."""
    schemas = read_schemas(real("llama.cpp/tests/test-json-schema-to-grammar.cpp"))
    random, refused = Random(0), dict[str, str]()
    for name, schema in schemas.items():
        try:
            matcher = grammars().of_schema(schema, "response_format")
        except ApiError as error:
            refused[name] = error.message
            continue
        validator = validator_of(schema)
        tried = {json.dumps(value): value for value in samples(schema, schema)}
        assert [value for value in tried.values() if takes(matcher, value) != validator.is_valid(value)] == [], name
        made = [json.loads(text) for _ in range(8) if (text := written(matcher, random)) is not None]
        assert [value for value in made if is_finite(value) and not validator.is_valid(value)] == [], name
    assert len(schemas) - len(refused) >= 70
    for name, message in refused.items():
        assert re.search("prefixItems must be an array|Invalid type: kaboom|type must be|regex parse error", message)
        # Not refused by llama.cpp, which takes an object for the list of prefixItems, and any text for such a pattern.
        assert message.startswith("response_format cannot be enforced"), name


KINDS = {"string": "text"} | dict.fromkeys(("number", "boolean", "null", "array", "object"), "json")
FORMS = {
    "an object": ToolFormat("toy", (), "<a>", "</a>"),
    "pairs": ToolFormat("toy", (), "<a>", "</a>", call="{name}{arguments}", pairs=Pairs("<p=", ">", "</p>", pad="\n")),
    "typed pairs": ToolFormat(
        "toy", (), "<a>", "</a>", call="{name}{arguments}", pairs=Pairs('<p n="', '" as="{kind}">', "</p>", kinds=KINDS)
    ),
    "as in Python": ToolFormat(
        "toy", (), "<a>", "</a>", call="{name}({arguments})", pairs=Inline("=", ", ", "'", True, False)
    ),
    "quotes of its own": ToolFormat(
        "toy", (), "<a>", "</a>", call="call:{name}{{arguments}}", pairs=Inline(":", ",", '<|"|>', False, True)
    ),
}


@pytest.mark.parametrize("how", FORMS)
def test_arguments_keep_to_them_in_every_notation(how: str) -> None:
    """Or the schema is refused."""
    form = FORMS[how]
    schemas = read_schemas(real("llama.cpp/tests/test-json-schema-to-grammar.cpp"))
    inside = {f"{name}, inside": {"type": "object", "properties": {"a": schema}, "required": ["a"]} | {
        key: schema[key] for key in ("definitions", "$defs") if key in schema
    } for name, schema in schemas.items() if "#/prop" not in json.dumps(schema)}  # fmt: skip
    random, kept = Random(0), 0
    for name, schema in (schemas | inside).items():
        if schema.get("type", "object") != "object":
            continue
        tool = FunctionTool.model_validate({"type": "function", "function": {"name": "go", "parameters": schema}})
        try:
            matcher = grammars().of_tools([tool], form, forced=True, several=False)
        except ApiError as error:
            assert re.match(r"tools(\.go)? cannot be enforced: ", error.message), name
            continue
        validator = validator_of({"type": "object", **schema})
        for _ in range(3):
            if (text := written(matcher, random)) is None:
                continue
            _, calls = ToolReader(form, schemas={"go": schema}).push(text, True)
            assert len(calls) == 1, (name, text)
            values = json.loads(calls[0]["function"]["arguments"])
            assert isinstance(values, dict)
            assert not is_finite(values) or validator.is_valid(values), (name, schema, text, values)
            kept += 1
    assert kept > 20
