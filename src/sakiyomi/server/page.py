"""Pages: the web page at ``/``, and the list of all paths at ``/docs``; headers let them talk to this server alone.

The web page is a client like any other. What it draws is what ``trace: true`` gives to everybody.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import jinja2
from starlette.responses import Response

SCRIPTS = "base", "markdown", "lanes", "tree", "chats", "speech", "talk"
"""Parts of the one script, in this order."""

_NONE = "'none'"
# A block without attributes: data blocks (type="application/json") do not run and need no permission.
_BLOCK = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
_REFERENCE = "#/components/schemas/"


def web_file(name: str) -> str:
    """The text of a file in ``web/``."""
    return files("sakiyomi.server").joinpath("web", name).read_text(encoding="utf-8")


def document() -> str:
    """The page as it is sent: markup with style, texts and script in it."""
    parts = {
        "style": f"<style>\n{web_file('style.css')}</style>",
        "texts": f'<script type="application/json" id="texts">\n{web_file("texts.json")}</script>',
        "script": "<script>\n" + "\n".join(web_file(f"{name}.js") for name in SCRIPTS) + "</script>",
    }
    html = web_file("index.html")
    for name, text in parts.items():
        html = html.replace(f"<!-- {name} -->", text)
    return html


def policy(html: str) -> str:
    """Content-Security-Policy of a page: its own blocks, by their hashes, and requests to where it came from.

    Args:
        html: the page as it is sent; its lines end with a line feed alone.
    """
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _BLOCK.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(hashes['script'] or [_NONE])}",
            f"style-src {' '.join(hashes['style'])}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        ]
    )


def page() -> Response:
    """The web page with its headers."""
    return as_page(document())


def as_page(html: str, status: int = 200, **headers: str) -> Response:
    """A document as a reply, with the headers of our pages."""
    return Response(
        html,
        status_code=status,
        media_type="text/html",
        headers={
            "content-security-policy": policy(html),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            **headers,
        },
    )


def reference(document: Mapping[str, Any], url: str, *, keyed: bool) -> Response:
    """The page at ``/docs``: paths, fields, bounds and examples of curl. Its markup is ``web/reference.html``.

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
            taken = content.get("application/json", {})
            name = taken.get("schema", {}).get("$ref", "").removeprefix(_REFERENCE)
            bodies |= {name} & schemas.keys()
            words = ["curl", url + path] + (["-H", "authorization: Bearer KEY"] if keyed else [])
            if taken:
                example = taken.get("example", dict.fromkeys(schemas[name].get("required", ()), "..."))
                words += ["-H", "content-type: application/json", "-d", json.dumps(example)]
            elif content:
                words += ["--data-binary", "@FILE"]
            about = {"path": path, "verb": verb, "about": what.get("description", ""), "body": schemas.get(name)}
            operations.append(about | {"example": shlex.join(words)})
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [(name, schemas[name]) for name in sorted(_parts(bodies, schemas))]
    return as_page(rendered("reference.html", title=title, operations=operations, parts=parts))


def rendered(name: str, **values: Any) -> str:
    """A Jinja template of ``web/`` with these values."""
    environment = jinja2.Environment(autoescape=True)
    environment.filters["json"] = json.dumps
    return environment.from_string(web_file(name)).render(**values)


def _parts(bodies: set[str], schemas: Mapping[str, Any]) -> set[str]:
    """Names of the schemas that bodies consist of."""
    found: set[str] = set()
    left = set(bodies)
    while left:
        name = left.pop()
        found.add(name)
        left |= set(re.findall(f'"{_REFERENCE}([^"]+)"', json.dumps(schemas[name]))) - found
    return found - bodies
