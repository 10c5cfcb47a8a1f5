"""The page at ``/docs``: paths, fields, bounds and examples of curl, made of the OpenAPI document.

The markup is ``web/reference.html``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

import jinja2
from starlette.responses import Response

from sakiyomi.server.page import as_page, web_file

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

_REFERENCE = "#/components/schemas/"


def reference(document: Mapping[str, Any], url: str, *, keyed: bool) -> Response:
    """The page with its headers.

    Args:
        document: OpenAPI's.
        url: of the server, as its client knows it, without a slash at the end.
        keyed: requests need a key.
    """
    schemas = document.get("components", {}).get("schemas", {})
    operations, bodies = [], set()
    for path, verbs in document["paths"].items():
        for verb, what in verbs.items():
            content = what.get("requestBody", {}).get("content", {})
            name = content.get("application/json", {}).get("schema", {}).get("$ref", "").removeprefix(_REFERENCE)
            bodies |= {name} & schemas.keys()
            words = ["curl", url + path] + (["-H", "authorization: Bearer KEY"] if keyed else [])
            if name:
                words += ["-H", "content-type: application/json", "-d", json.dumps(EXAMPLES[path])]
            elif content:
                words += ["--data-binary", "@FILE"]
            about = {"path": path, "verb": verb, "about": what.get("description", ""), "body": schemas.get(name)}
            operations.append(about | {"example": shlex.join(words)})
    environment = jinja2.Environment(autoescape=True)
    environment.filters["json"] = json.dumps
    return as_page(
        environment.from_string(web_file("reference.html")).render(
            title=f"{document['info']['title']} {document['info']['version']}",
            operations=operations,
            parts=[(name, schemas[name]) for name in sorted(_parts(bodies, schemas))],
        )
    )


def _parts(bodies: set[str], schemas: Mapping[str, Any]) -> set[str]:
    """Names of the schemas that bodies consist of."""
    found: set[str] = set()
    left = set(bodies)
    while left:
        name = left.pop()
        found.add(name)
        left |= set(re.findall(f'"{_REFERENCE}([^"]+)"', json.dumps(schemas[name]))) - found
    return found - bodies
