"""The page as the server gives it: one small file that needs nothing from elsewhere; a policy holds it to that.

What it does in a browser is in ``test_browser.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import httpx
import pytest

from sakiyomi.server.page import policy
from server_toys import running, toy_llm, web


@pytest.fixture(scope="module")
def reply() -> Iterator[httpx.Response]:
    """With a key set: the page itself has to come without one, to ask for it."""
    with running(toy_llm("none"), api_key="k") as (_, url):
        yield web.get(f"{url}/", timeout=60)


class Elements(HTMLParser):
    """Tags with their attributes, and the text of each data block."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and (name := self.tags[-1][1].get("id")):
            self.blocks.setdefault(name, data)


def test_it_comes_at_the_root_without_a_key_and_is_small(reply: httpx.Response) -> None:
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    assert len(reply.content) <= 150_000
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_its_policy_lets_its_own_blocks_run_and_nothing_else(reply: httpx.Response) -> None:
    rules = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    for kind in ("script", "style"):
        (block,) = re.findall(rf"<{kind}>(.*?)</{kind}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"


def test_another_script_changes_the_policy() -> None:
    assert policy("<script>1</script>") != policy("<script>2</script>")


def test_it_needs_nothing_from_elsewhere(reply: httpx.Response) -> None:
    found = re.findall(
        r"""(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s"']*""", re.sub(r"^\s*//.*$", "", reply.text, flags=re.M)
    )
    assert found == ["http://www.w3.org/2000/svg"]  # the name of a namespace, which nobody loads
    loaded = [
        value for _, values in Elements(reply.text).tags for name in ("src", "href") if (value := values.get(name))
    ]
    assert loaded == ["data:,", "#prompt", "#panel"]
    assert not re.search(r"@import|url\(|innerHTML|eval\(|sessionStorage|document\.cookie", reply.text)


def test_no_style_or_handler_is_in_an_attribute(reply: httpx.Response) -> None:
    """The policy would not let them work."""
    for _, values in Elements(reply.text).tags:
        assert not any(name == "style" or name.startswith("on") for name in values)


def test_every_text_is_there_in_both_languages(reply: httpx.Response) -> None:
    page = Elements(reply.text)
    texts = json.loads(page.blocks["texts"])
    for name, (english, japanese) in texts.items():
        assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", japanese)), name
        assert english.strip() and japanese.strip()
    asked = {value for _, values in page.tags for name in ("data-t", "data-l", "data-p") if (value := values.get(name))}
    assert asked <= set(texts)
    script = re.search(r"<script>(.*)</script>", reply.text, re.DOTALL)
    assert script is not None
    # Without ids, names of elements and comparisons, what is left in calls are keys.
    plain = re.sub(r"""\$\("\w+"\)|make\("\w+", "\w*"|\{id: "\w+"\}|=== "\w*\"""", "", script[1])
    spoken = set(re.findall(r"""(?:\btext|\bFailure)\("(\w+)\"""", plain))
    spoken |= set(re.findall(r"""\b(?:say|button)\([^"\n;]*"(\w+)\"""", plain))
    assert len(spoken) > 10 and spoken <= set(texts), spoken - set(texts)


def test_every_field_has_a_label(reply: httpx.Response) -> None:
    tags = Elements(reply.text).tags
    labelled = {values.get("for") for tag, values in tags if tag == "label"}
    fields = {values.get("id") for tag, values in tags if tag in ("input", "select", "textarea")}
    assert fields - labelled == {"language", "theme", "keep", "choice"}  # which their labels hold
    ids = [values["id"] for _, values in tags if "id" in values]
    assert len(ids) == len(set(ids))
