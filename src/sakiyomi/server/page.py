"""The web page at ``/``: one document made of the files in ``web/``, and headers that let it talk to this server alone.

It is a client like any other. What it draws is what ``trace: true`` gives to everybody.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response

__all__ = ["as_page", "document", "page", "policy", "web_file"]

SCRIPTS = "base", "markdown", "lanes", "tree", "chats", "talk"
"""Parts of the one script, in this order."""

_NONE = "'none'"
# A block without attributes: data blocks (type="application/json") do not run and need no permission.
_BLOCK = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


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
    """The page with its headers, read once."""
    return as_page(document())


def as_page(html: str) -> Response:
    """A document as a reply, with the headers of our pages."""
    return Response(
        html,
        media_type="text/html",
        headers={
            "content-security-policy": policy(html),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )
