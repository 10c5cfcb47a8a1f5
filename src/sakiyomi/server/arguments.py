"""Arguments of calls that are written one by one, as texts: which of them are JSON, by the schema of a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["DEFINITIONS", "KINDS", "kind_of", "kinds", "resolved", "value_of"]

DEFINITIONS = ("$defs", "definitions")
KINDS = frozenset({"string", "null", "boolean", "number", "object", "array"})


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema refers to in its root, itself where it refers to nothing."""
    for _ in range(16):
        if not (isinstance(schema, Mapping) and str(schema.get("$ref", "")).startswith("#/")):
            break
        found: Any = root
        for name in schema["$ref"][2:].split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        schema = found
    return schema


def kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON's types that a value may have; whole numbers are numbers."""
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
    """The value of an argument: a text as it is where it can be nothing else, JSON where that fits."""
    allowed = kinds(root.get("properties", {}).get(key), root)
    if allowed == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if not isinstance(value, str) and kind_of(value) in allowed else text


def kind_of(value: Any) -> str:
    """JSON's type of a value; whole numbers are numbers."""
    if value is None:
        return "null"
    for kind, types in (("boolean", bool), ("number", (int, float)), ("object", dict), ("array", list)):
        if isinstance(value, types):
            return kind
    return "string"
