"""The web page at ``/``: one file, and headers that let it do nothing but talk to this server.

It is a client like any other. What it draws is what ``trace: true`` gives to everybody.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response

__all__ = ["page", "policy"]

# A block without attributes: data blocks (type="application/json") do not run and need no permission.
_BLOCK = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


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
            f"script-src {' '.join(hashes['script'])}",
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
    html = files("sakiyomi.server").joinpath("index.html").read_text(encoding="utf-8")
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
