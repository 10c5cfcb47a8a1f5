"""The page at ``/docs``: paths, fields, bounds and examples of curl, made of the OpenAPI document."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from starlette.responses import Response

from sakiyomi.server.page import as_page

__all__ = ["EXAMPLES", "reference"]

EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 16},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/embeddings": {"input": ["A fox", "A wolf"]},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
"""Bodies that any server answers, by path."""

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0;border-bottom:1px solid #8886}"
    "pre{overflow-x:auto;padding:.6rem;background:#8882}"
    "code{overflow-wrap:anywhere}"
    "section{margin:2.5rem 0}"
)
_REFERENCE = "#/components/schemas/"


def reference(document: Mapping[str, Any], url: str, *, keyed: bool) -> Response:
    """The page with its headers.

    Args:
        document: OpenAPI's.
        url: of the server, as its client knows it, without a slash at the end.
        keyed: requests need a key.
    """
    schemas = document.get("components", {}).get("schemas", {})
    paths = [(path, verb, what) for path, verbs in document["paths"].items() for verb, what in verbs.items()]
    parts = [_operation(path, verb, what, schemas, url, keyed) for path, verb, what in paths]
    parts += [_schema(name, schemas[name]) for name in sorted(_used(paths, schemas))]
    listed = "".join(
        f'<li><a href="#{escape(verb + path)}"><code>{verb.upper()} {escape(path)}</code></a></li>'
        for path, verb, _ in paths
    )
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return as_page(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>The same for programs: "
        '<a href="/openapi.json">/openapi.json</a>. A field that is not listed is refused.</p>'
        f"<nav><ul>{listed}</ul></nav><main>{''.join(parts)}</main></body></html>"
    )


def _operation(path: str, verb: str, what: Mapping[str, Any], schemas: Mapping[str, Any], url: str, keyed: bool) -> str:
    """A path: what it does, its body's fields, an example."""
    body = what.get("requestBody", {}).get("content", {})
    name = body.get("application/json", {}).get("schema", {}).get("$ref", "").removeprefix(_REFERENCE)
    words = ["curl", url + path]
    if keyed:
        words += ["-H", "authorization: Bearer KEY"]
    if name:
        words += ["-H", "content-type: application/json", "-d", json.dumps(EXAMPLES[path])]
    elif body:
        words += ["--data-binary", "@FILE"]
    fields = _fields(schemas[name]) if name else ""
    return (
        f'<section id="{escape(verb + path)}"><h2><code>{verb.upper()} {escape(path)}</code></h2>'
        f"<p>{escape(what.get('description', ''))}</p>{fields}<pre>{escape(shlex.join(words))}</pre></section>"
    )


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    """A part of bodies."""
    described = escape(schema.get("description", ""))
    return f'<section id="{escape(name)}"><h3>{escape(name)}</h3><p>{described}</p>{_fields(schema)}</section>'


def _fields(schema: Mapping[str, Any]) -> str:
    rows = []
    for name, field in schema.get("properties", {}).items():
        default = "" if "default" not in field else f"<code>{escape(json.dumps(field['default']))}</code>"
        default = "required" if name in schema.get("required", ()) else default
        rows.append(
            f"<tr><td><code>{escape(name)}</code></td><td>{_kind(field)}</td><td>{default}</td>"
            f"<td>{escape(field.get('description', ''))}</td></tr>"
        )
    return f"<table><tr><th>field</th><th>kind</th><th>default</th><th></th></tr>{''.join(rows)}</table>"


def _kind(field: Mapping[str, Any]) -> str:
    """What a field may be, with its bounds."""
    if "$ref" in field:
        name = escape(field["$ref"].removeprefix(_REFERENCE))
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in field:
            return " or ".join(map(_kind, field[several]))
    values = field.get("enum", [field["const"]] if "const" in field else [])
    if values:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind = escape(str(field.get("type", "anything")))
    if kind == "array":
        kind = f"list of {_kind(field.get('items', {}))}"
    bounds = ", ".join(_bounds(field))
    return f"{kind} ({bounds})" if bounds else kind


def _bounds(field: Mapping[str, Any]) -> Iterator[str]:
    words = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "below {}",
        "minLength": "at least {} characters",
        "maxLength": "at most {} characters",
        "minItems": "at least {} items",
        "maxItems": "at most {} items",
        "pattern": "like {}",
    }
    return (
        escape(text.format(_number(field[name])))
        for name, text in words.items()
        if name in field and (name, field[name]) != ("minLength", 0)
    )


def _number(value: Any) -> Any:
    """A whole number without a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _used(paths: list[tuple[str, str, Any]], schemas: Mapping[str, Any]) -> set[str]:
    """Names of what bodies consist of, from their own fields down."""
    bodies = {
        name
        for _, _, what in paths
        for content in what.get("requestBody", {}).get("content", {}).values()
        if (name := content.get("schema", {}).get("$ref", "").removeprefix(_REFERENCE))
    }
    found: set[str] = set()
    left = set(bodies)
    while left:
        name = left.pop()
        found.add(name)
        left |= set(_names(schemas[name])) - found
    return found - bodies


def _names(schema: Any) -> Iterator[str]:
    """Schemas that a schema names, anywhere in it."""
    if isinstance(schema, dict):
        if isinstance(name := schema.get("$ref"), str):
            yield name.removeprefix(_REFERENCE)
        for value in schema.values():
            yield from _names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _names(value)
