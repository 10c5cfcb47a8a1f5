"""Answers of models, and what is in them, as the tests of llama.cpp say: read out of ``tests/test-chat.cpp``.

An interpreter of the little C++ that these tests are made of: texts, lists, objects, chains of methods, loops over
lists, and functions with a template's name. Whatever else there is, it passes over.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/|^\#[^\n]*)"""
    r"""|(?P<raw>R"(?P<mark>[^\s()\\]*)\((?P<inner>.*?)\)(?P=mark)")"""
    r"""|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<char>'(?:[^'\\]|\\.)+')"""
    r"""|(?P<name>[A-Za-z_]\w*(?:::\w+)*)|(?P<number>\d[\w.]*)|(?P<sign>->|.)""",
    re.DOTALL | re.MULTILINE,
)
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class UnknownError(Exception):
    """C++ that is not understood."""


@dataclass
class Message:
    """A message of a conversation, or what is expected of an answer.

    Attributes:
        calls: names and arguments, a text.
    """

    role: str = "assistant"
    content: str = ""
    reasoning_content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    tool_call_id: str = ""
    id: str = ""


@dataclass
class Answer:
    """One case.

    Attributes:
        name: the template's, and the case's number among those of the template.
        template: the file, without folder.
        text: of the answer.
        options: what the request asks for: each method's one argument.
        expect: what is in it.
    """

    name: str
    template: str
    text: str
    options: dict[str, Any]
    expect: Message


def read_answers(path: Path) -> list[Answer]:
    """All cases of a file."""
    return _Program(path.read_text(encoding="utf-8")).run()


def _tokens(source: str) -> list[tuple[str, str]]:
    found = []
    for match in _TOKEN.finditer(source):
        kind = str(match.lastgroup)
        if match["raw"] is not None:
            found.append(("text", match["inner"]))
        elif kind == "text":
            found.append((kind, str(ast.literal_eval(_python(match[0])))))
        elif kind != "skip":
            found.append((kind, match[0]))
    return found


def _python(literal: str) -> str:
    """A text of C++ as Python writes it: bytes by their hexadecimal numbers are parts of characters there."""
    if "\\x" not in literal:
        return literal
    plain = re.sub(r"[^\x00-\x7f]+", lambda found: "".join(f"\\x{byte:02x}" for byte in found[0].encode()), literal)
    return repr(ast.literal_eval("b" + plain).decode())


# ---------------------------------------------------------------- functions of the tests


def _message(content: str, reasoning: str = "", name: str = "", arguments: str = "", id_: str = "") -> Message:
    return Message("assistant", content, reasoning, [(name, arguments)] if name or id_ else [], id=id_)


def _tool(name: str, description: str, parameters: str) -> dict[str, Any]:
    return {"name": name, "description": description, "parameters": json.loads(parameters)}


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "simple_assist_msg": _message,
    "message_with_tool_calls": lambda name, arguments: _message("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, thoughts: _message("", thoughts, name, arguments),
    "message_with_content_and_tool_call": lambda said, name, arguments: _message(said, "", name, arguments),
    "message_with_reasoning_and_tool_call": lambda thoughts, name, arguments: _message("", thoughts, name, arguments),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda thoughts, said, calls: Message(
        "assistant", said, thoughts, [(name, arguments) for name, arguments, *_ in calls]
    ),
    "std::string": lambda text: text,
}


class _Program:
    def __init__(self, source: str) -> None:
        self._tokens = _tokens(source)
        self._names: dict[str, Any] = {"true": True, "false": False, "detailed_debug": False}
        self._functions: dict[str, tuple[str, int, int]] = {}
        self._testers: dict[str, str] = {}
        self._counts = Counter[str]()
        self._found: list[Answer] = []

    def run(self) -> list[Answer]:
        self._block(0, len(self._tokens))
        return self._found

    def _is(self, at: int, *texts: str) -> bool:
        return [text for _, text in self._tokens[at : at + len(texts)]] == list(texts)

    def _end(self, at: int) -> int:
        """Where the bracket at this place is closed."""
        depth = 0
        for place in range(at, len(self._tokens)):
            kind, text = self._tokens[place]
            depth += (kind == "sign") * ((text in _CLOSING) - (text in _CLOSING.values()))
            if not depth:
                return place
        raise UnknownError

    def _block(self, at: int, end: int) -> None:
        while at < end:
            try:
                at = self._statement(at)
            except (UnknownError, IndexError, TypeError, ValueError, AttributeError):
                at += 1

    def _statement(self, at: int) -> int:
        """Run what begins here; the place behind it."""
        kind, text = self._tokens[at]
        if text == "for" and kind == "name":
            return self._loop(at)
        if kind != "name":
            return at + 1
        if self._is(at + 1, "(") and text.startswith("test_"):
            return self._function(text, at + 1)
        if text == "common_chat_tool" and self._is(at + 2, "{"):
            values, after = self._items(at + 2)
            self._names[self._tokens[at + 1][1]] = _tool(*values)
            return after
        if text == "common_chat_msg" and self._is(at + 2, "{"):
            (role, said, *_), after = self._items(at + 2)
            self._names[self._tokens[at + 1][1]] = Message(role, said)
            return after
        if text == "common_chat_msg" and self._is(at + 2, ";"):
            self._names[self._tokens[at + 1][1]] = Message()
            return at + 3
        if self._is(at + 1, "=") and (self._tokens[at - 1][0] == "name" or self._is(at - 1, "*")):
            if self._is(at + 2, "peg_tester"):
                (path, *_), after = self._items(at + 3)
                self._testers[text] = path
            else:
                self._names[text], after = self._value(at + 2)
            return after
        if isinstance(self._names.get(text), Message) and self._is(at + 1, ".") and self._is(at + 3, "="):
            value, after = self._value(at + 4)
            setattr(self._names[text], self._tokens[at + 2][1], value)
            return after
        if text in self._testers and self._is(at + 1, ".", "test", "("):
            return self._case(self._testers[text], at + 3)
        return at + 1

    def _loop(self, at: int) -> int:
        """``for (TYPE name : list) { ... }``, or ``for (TYPE name : list) statement``."""
        head, close = at + 1, self._end(at + 1)
        colon = next((place for place in range(head, close) if self._is(place, ":")), None)
        if colon is None:
            return head
        values, _ = self._value(colon + 1)
        body, end = close + 1, self._end(close + 1)
        for value in values:
            self._names[self._tokens[colon - 1][1]] = value
            self._block(body + 1, end)
        return end

    def _function(self, name: str, at: int) -> int:
        """A function with a template's name is kept; where it is called, it runs."""
        close = self._end(at)
        if self._is(close + 1, "{"):
            parameter = next((p for p in range(at, close) if self._is(p, "template_path")), None)
            if parameter is None:
                return close + 1
            self._functions[name] = "template_path", close + 2, self._end(close + 1)
            return self._end(close + 1)
        if name in self._functions:
            parameter_name, begin, end = self._functions[name]
            self._names[parameter_name], _ = self._value(at + 1)
            self._block(begin, end)
        return close + 1

    def _case(self, path: str, at: int) -> int:
        template = path.rpartition("/")[2].removesuffix(".jinja")
        self._counts[template] += 1
        (text,), after = self._items(at)
        options: dict[str, Any] = {}
        expect = Message()
        while self._is(after, "."):
            method = self._tokens[after + 1][1]
            values, after = self._items(after + 2)
            if method == "expect":
                expect = Message(**vars(values[0]))
            elif method == "expect_content":
                expect.content = values[0]
            elif method == "expect_reasoning":
                expect.reasoning_content = values[0]
            elif method == "expect_tool_calls":
                expect.calls = [(name, arguments) for name, arguments, *_ in values[0]]
            elif method == "tools":
                options[method] = [_tool(*tool) if isinstance(tool, list) else tool for tool in values[0]]
            elif method not in ("run", "expect_reconstruction"):
                (options[method],) = values
        self._found.append(Answer(f"{template} {self._counts[template]}", template, text, options, expect))
        return after

    # ------------------------------------------------------------ expressions

    def _items(self, at: int) -> tuple[list[Any], int]:
        """The values between brackets, and the place behind them."""
        end = self._end(at)
        found: list[Any] = []
        place = at + 1
        while place < end:
            value, place = self._value(place)
            found.append(value)
            if place < end and not self._is(place, ","):
                raise UnknownError(self._tokens[place : place + 5])
            place += 1
        return found, end + 1

    def _value(self, at: int) -> tuple[Any, int]:
        value, at = self._part(at)
        while self._is(at, "+"):
            more, at = self._part(at + 1)
            value = value + more
        return value, at

    def _part(self, at: int) -> tuple[Any, int]:
        kind, text = self._tokens[at]
        if kind == "text":
            whole = ""
            while self._tokens[at][0] == "text":
                whole, at = whole + self._tokens[at][1], at + 1
            return whole, at
        if kind == "sign" and text == "{":
            return self._items(at)
        if kind == "name" and self._is(at + 1, "("):
            values, after = self._items(at + 1)
            if text not in FUNCTIONS:
                raise UnknownError(text)
            return FUNCTIONS[text](*values), after
        if kind == "name" and text in self._names:
            return self._names[text], at + 1
        if kind == "name" and text.isupper():
            return text, at + 1
        raise UnknownError(text)


def cases_of(answers: list[Answer]) -> Iterator[tuple[str, list[Answer]]]:
    """Answers by template."""
    for template in dict.fromkeys(answer.template for answer in answers):
        yield template, [answer for answer in answers if answer.template == template]


def read_schemas(path: Path) -> dict[str, Any]:
    """The schemas of ``tests/test-json-schema-to-grammar.cpp`` by name."""
    found = {}
    tokens = _tokens(path.read_text(encoding="utf-8"))
    for place, (_, text) in enumerate(tokens):
        parts = tokens[place + 1 : place + 5]
        if text in ("SUCCESS", "FAILURE") and [kind for kind, _ in parts] == ["sign", "text", "sign", "text"]:
            with suppress(ValueError):
                found[parts[1][1]] = json.loads(parts[3][1])
    return found
