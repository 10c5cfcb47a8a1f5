"""What bodies are made of: strict objects, unions whose kinds are told apart by the value alone, and JSON schemas.

Only one kind of a union is tried, so that the errors of a body are those of the kind that was meant. Its tag stands in
pydantic's places between signs that no field has; ``errors.py`` leaves it out.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

T = TypeVar("T")
DEFINITIONS = ("$defs", "definitions")
KINDS = frozenset({"string", "null", "boolean", "number", "object", "array"})


def _whole(value: Any) -> Any:
    """JSON schema counts 2.0 as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_items(value: Any) -> Any:
    """The same for the items of a list."""
    return [*map(_whole, value)] if isinstance(value, list) and float in set(map(type, value)) else value


def _kind(value: Any) -> str:
    return "<object>" if isinstance(value, BaseModel) else f"<{kind_of(value)}>"


def by_type(default: str = "") -> Discriminator:
    """Tells objects apart by their field ``type``, by default ``default``."""

    def type_of(value: Any) -> str:
        if isinstance(value, BaseModel):
            return f"<{value.type}>"  # type: ignore[attr-defined]
        return f"<{value.get('type') or default}>" if isinstance(value, dict) else _kind(value)

    return Discriminator(type_of)


BY_KIND = Discriminator(_kind)
"""Tells values apart by their JSON type: ``<string>``, ``<number>``, ``<object>``, ``<array>``."""
BY_TYPE = by_type()

WHOLE = BeforeValidator(_whole)  # after the bounds: before them it would hide them from the OpenAPI document
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE]
Count = Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE]
# Long lists are checked natively, up to the first wrong item.
Ids = Annotated[
    list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1, fail_fast=True), BeforeValidator(whole_items)
]
Text = Annotated[str, Field(min_length=0)]  # with a bound pydantic refuses lone surrogates
ListOrText = Annotated[Annotated[Text, Tag("<string>")] | Annotated[T, Tag("<array>")], BY_KIND]
"""A text, or this kind of list."""
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[T, Tag("<object>")], BY_KIND
]
"""Which tools are called; an object names one."""


def _allow_null(schema: dict[str, Any]) -> None:
    """Declare in the OpenAPI document that optional fields take null."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        if name in required or {"type": "null"} in field.get("anyOf", [field]):
            continue
        about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
        inner = dict(field)
        field.clear()
        field |= {"anyOf": [inner, {"type": "null"}], **about}
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = {"type": "null"}


class Strict(BaseModel):
    """A body, or part of one: strict types, no unknown fields.

    A field that is null counts as left out: clients send null for what they do not set.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_allow_null)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        if not isinstance(values, dict) or None not in values.values():
            return values
        needed = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in values.items() if value is not None or name in needed}


# ---------------------------------------------------------------- JSON schemas


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a ``$ref`` names in its root, or the schema itself."""
    for _ in range(16):
        if not (isinstance(schema, Mapping) and str(schema.get("$ref", "")).startswith("#/")):
            break
        found: Any = root
        for name in schema["$ref"][2:].split("/"):
            if isinstance(found, list) and name.isdecimal():
                found = dict(enumerate(found)).get(int(name))
            else:
                found = found.get(name) if isinstance(found, Mapping) else None
        schema = found
    return schema


def kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a value may have; integers are numbers."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return KINDS
    if "const" in schema or "enum" in schema:
        return frozenset(map(kind_of, schema.get("enum", [schema.get("const")])))
    if "type" in schema:
        named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        return frozenset("number" if kind == "integer" else kind for kind in named)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return frozenset().union(*(kinds(each, root) for each in schema[word]))
    return KINDS


def value_of(text: str, root: Mapping[str, Any], key: str) -> Any:
    """The value of an argument: plain text if the schema allows only strings, JSON of an allowed type otherwise."""
    allowed = kinds(root.get("properties", {}).get(key), root)
    if allowed == {"string"}:
        return text
    value: Any = text
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    if value is text and "string" not in allowed:  # templates show values as Python writes them, and models learn that
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = json.loads(json.dumps(ast.literal_eval(text)))  # a TypeError: JSON has no such value
    return value if not isinstance(value, str) and kind_of(value) in allowed else text


def kind_of(value: Any) -> str:
    """JSON type of a value; integers are numbers."""
    if value is None:
        return "null"
    for kind, types in (("boolean", bool), ("number", (int, float)), ("object", dict), ("array", list)):
        if isinstance(value, types):
            return kind
    return "string"
