"""The page at ``/docs``: all that the OpenAPI document has, examples that work, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
from collections.abc import Iterator

import pytest

from server_toys import running, toy_llm, web


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(toy_llm("none"), api_key="k") as (_, found):
        yield found


def test_it_has_every_path_field_and_bound_and_needs_nothing_from_elsewhere(url: str) -> None:
    document, reply = web.get(f"{url}/openapi.json").json(), web.get(f"{url}/docs")
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    for path, verbs in document["paths"].items():
        for verb, what in verbs.items():
            assert f'id="{verb}{path}"' in reply.text
            for content in what.get("requestBody", {}).get("content", {}).values():
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                part = reply.text.partition(f'id="{verb}{path}"')[2].partition("</section>")[0]
                known = document["components"]["schemas"].get(name, {}).get("properties", {})
                assert all(f"<td><code>{field}</code></td>" in part for field in known)
    assert "integer (at least 1, at most 128) or null" in reply.text and "number (above 0, at most 1)" in reply.text
    linked = set(re.findall(r'href="([^"]*)"', reply.text))
    assert {link for link in linked if not link.startswith("#")} == {"/openapi.json", "data:,"}
    assert {link[1:] for link in linked if link.startswith("#")} <= set(re.findall(r'id="([^"]*)"', reply.text))
    (style,) = re.findall("<style>(.*?)</style>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert rules["style-src"] == f"'sha256-{digest}'" and rules["script-src"] == rules["default-src"] == "'none'"
    assert "<script" not in reply.text and not re.search(r"\bsrc=|@import|url\(| on\w+=| style=", reply.text)


def test_its_examples_are_answered(url: str) -> None:
    tried = 0
    for command in re.findall("<pre>(.*?)</pre>", web.get(f"{url}/docs").text):
        words = shlex.split(html.unescape(command))
        if "-d" not in words:
            continue
        headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
        assert headers.pop("authorization") == "Bearer KEY"
        headers["authorization"] = "Bearer k"
        reply = web.post(words[1], headers=headers, content=words[words.index("-d") + 1], timeout=60)
        assert reply.status_code == 200, (words[1], reply.text)
        assert json.loads(reply.text)
        tried += 1
    assert tried >= 7


def test_a_hosts_name_is_no_markup(url: str) -> None:
    reply = web.get(f"{url}/docs", headers={"host": "a<b>'c"})
    assert "<b>" not in reply.text
