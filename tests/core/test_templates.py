"""Chat templates are programs: what they fail with, and what they may take."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.templates import TemplateProcess


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(seconds=0.2, memory=1 << 28)
    yield made
    made.close()


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(60) }}",
    "{% set a = [1] %}{% for i in a %}{% set _ = a.append(i) %}{% endfor %}",
]
LARGE = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{% set n = namespace(a='a') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "{% set n = namespace(a='a') %}{% for i in range(27) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}",
]
FAILING = {
    "{{ raise_exception('only users') }}": "TemplateError: only users",
    "{{ nobody.name }}": "UndefinedError: 'nobody' is undefined",
    "{{ 'a' | shout }}": "No filter named 'shout'",
    "{% if %}": "TemplateSyntaxError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{% set n = namespace(_a=1) %}": "SecurityError",
    "{% for i in range(10 ** 9) %}{% endfor %}": "Range too big",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
}


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_has_limited_time(process: TemplateProcess, template: str) -> None:
    """Another one works after it."""
    with pytest.raises(InputError, match=r"takes more than 0.2 s"):
        process.render(template, {})
    assert process.render("{{ a }}", {"a": "先"}) == "先"


@pytest.mark.parametrize("template", LARGE)
def test_a_template_has_limited_memory(process: TemplateProcess, template: str) -> None:
    with pytest.raises(InputError, match=r"more memory than|takes more than|characters, and"):
        process.render(template, {})
    assert process.render("{{ a }}", {"a": "b"}) == "b"


@pytest.mark.parametrize("template", FAILING)
def test_what_a_template_fails_with_is_told(process: TemplateProcess, template: str) -> None:
    with pytest.raises(InputError, match="the chat template fails") as caught:
        process.render(template, {})
    assert FAILING[template] in str(caught.value)


def test_what_templates_are_given(process: TemplateProcess) -> None:
    values = {"tools": [{"f": {"a": "<é>"}}, {"f": 1}], "odd": object(), "half": "\ud800"}
    for template, text in (
        ("{{ tools | map(attribute='f') | tojson }}", '[{"a": "<é>"}, 1]'),
        ("{{ tools | tojson(indent=1) }}", '[\n {\n  "f": {\n   "a": "<é>"\n  }\n },\n {\n  "f": 1\n }\n]'),
        ("{{ odd }} {{ half }}", "<object> \ud800"),
        ("a{% generation %}{% set b = 1 %}b{% endgeneration %}{{ b }}", "ab"),
        ("{% set a = [] %}{% set _ = a.append(1) %}{{ a }} {{ dict(b=2) }}", "[1] {'b': 2}"),
        ("{% for a in [1, 2, 3] %}{% if a == 2 %}{% break %}{% endif %}{{ a }}{% endfor %}\n  {% if 1 %}\nx{% endif %}",
         "1x"),
        ("{{ strftime_now('%Y') | length }}{% set n = namespace(self=1) %}{% set n.a = 2 %}{{ n.self + n.a }}", "43"),
    ):  # fmt: skip
        assert process.render(template, values) == text


def test_a_process_that_has_ended_is_started_again(process: TemplateProcess) -> None:
    """By the system, say."""
    assert process.render("a", {}) == "a" and process._child is not None
    os.kill(process._child.process.pid, signal.SIGKILL)
    assert process.render("b", {}) == "b"


def test_an_interrupt_does_not_mix_up_replies(process: TemplateProcess) -> None:
    """Ctrl-C while a template is rendered."""
    assert process.render("a", {}) == "a" and process._child is not None
    replies: Any = SimpleNamespace(readline=interrupted, close=process._child.replies.close)
    process._child = process._child._replace(replies=replies)
    with pytest.raises(KeyboardInterrupt):
        process.render("b", {})
    assert process.render("c", {}) == "c"


def interrupted() -> bytes:
    raise KeyboardInterrupt


def test_a_process_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(LoadError, match="cannot be started"):
        TemplateProcess().render("a", {})
