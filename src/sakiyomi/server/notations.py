"""How models write the arguments of a call where they are no object of JSON: one by one, or as in a program."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from sakiyomi.server.fields import kinds, value_of

KEY, KIND = "{key}", "{kind}"
"""In the texts of ``Pairs``: the name of the argument once more, and the JSON type of its value."""


CDATA = ("<![CDATA[", "]]>")
"""Around texts that have marks in them."""


class Notation(Protocol):
    """A way of writing arguments."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that are always written."""

    def read(self, text: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
        """Arguments at the beginning of a text, and the rest; None: they are incomplete."""


@dataclass(frozen=True)
class Pairs:
    """One by one: ``{before}NAME{named}{opened}{pad}VALUE{pad}{after}``; strings as plain text, the rest JSON.

    Line feeds between the marks are optional.

    Attributes:
        named: may have `KIND` in it, and ``after`` `KEY`.
        kinds: what stands for `KIND`, by JSON type.
    """

    before: str
    named: str
    after: str
    opened: str = ""
    pad: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def marks(self) -> tuple[str, ...]:
        """See ``Notation``."""
        return self.before, *self.named.split(KIND), self.opened, *self.after.split(KEY)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        named = re.escape(self.named).replace(re.escape(KIND), r"(?P<kind>\w+)")
        opened = rf"\s*{re.escape(self.opened)}" if self.opened else ""
        return re.compile(rf"{re.escape(self.before)}(?P<key>[^/<>\s][^<>]*?){named}{opened}")

    def read(self, text: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
        """See ``Notation``."""
        found: dict[str, Any] = {}
        while (head := self._head.match(rest := text.lstrip())) is not None:
            key, after = head["key"].strip(), self.after.replace(KEY, head["key"])
            marked = rest.startswith(CDATA[0], head.end())
            after = CDATA[1] + after if marked else after
            value, ended, text = rest[head.end() :].partition(after)
            if not ended:
                return None
            if "string" not in kinds(schema.get("properties", {}).get(key), schema):
                value, text = _whole(value, after, text)
            value = value.removeprefix(CDATA[0] if marked else self.pad).removesuffix("" if marked else self.pad)
            plain = bool(self.kinds) and head["kind"] == self.kinds.get("string")
            found[key] = value if plain else value_of(value, schema, key)
            if isinstance(found[key], str) and self._inside(value):
                found[key] = self._nested(value)
        return found, text

    def _inside(self, value: str) -> re.Match[str] | None:
        """Where a value that is written like arguments itself begins; None: it is not."""
        return self._head.match(value.removeprefix(self._between)) if KEY in self.after else None

    @cached_property
    def _between(self) -> str:
        return self.after.partition(KEY)[2].removeprefix(self.named)

    def _nested(self, text: str) -> Any:
        """Such a value: a list of items, or an object; without a schema."""
        pairs: list[tuple[str, Any]] = []
        text += self._between
        while (head := self._inside(text)) is not None:
            inner, ended, text = head.string[head.end() :].partition(self.after.replace(KEY, head["key"]))
            if not ended:
                break
            pairs.append((head["key"], self._nested(inner) if self._inside(inner) else _scalar(inner)))
        return [value for _, value in pairs] if all(key == "item" for key, _ in pairs) else dict(pairs)


def _whole(value: str, mark: str, rest: str) -> tuple[str, str]:
    """JSON up to a mark, and the rest; a mark inside of it ends nothing."""
    longer, behind = value, rest
    while True:
        with suppress(ValueError, RecursionError):
            json.loads(longer)
            return longer, behind
        more, ended, behind = behind.partition(mark)
        if not ended:
            return value, rest
        longer += mark + more


def _scalar(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return text if isinstance(value, dict | list) else value
    return text


@dataclass(frozen=True)
class Inline:
    """As in a call of a program: ``NAME{assign}VALUE{between}NAME{assign}VALUE``.

    Values are like those of JSON or Python; names inside them need no quotes.

    Attributes:
        quote: around strings; what stands between two longer marks is taken as it is.
        python: the words are True, False and None, and names inside of values are strings.
        ordered: names come in the order of the alphabet.
    """

    assign: str
    between: str
    quote: str
    python: bool
    ordered: bool

    @property
    def marks(self) -> tuple[str, ...]:
        """See ``Notation``."""
        return (self.quote,)

    def read(self, text: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
        """See ``Notation``."""
        with suppress(_CutError, RecursionError):
            reader = _Values(text, self.quote)
            return reader.pairs(self.assign), reader.rest()
        return None

    def written(self, values: Mapping[str, Any]) -> str:
        """Arguments as Python writes them."""
        return self.between.join(f"{name}{self.assign}{value!r}" for name, value in values.items())


class _CutError(Exception):
    """The text ends inside a value, or there is none."""


_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*")
_PLAIN = re.compile(r"[^\s,\[\](){}]+")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_QUOTED = {mark: re.compile(rf"{mark}((?:[^{mark}\\]|\\.)*){mark}", re.DOTALL) for mark in "'\""}


class _Values:
    """Reads values at the beginning of a text."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._at = text, quote, 0

    def rest(self) -> str:
        return self._text[self._at :]

    def pairs(self, assign: str) -> dict[str, Any]:
        """Names and values up to something else."""
        found: dict[str, Any] = {}
        while True:
            key = self._key()
            if key is None:
                return found
            self._take(assign.strip())
            found[key] = self._value()
            if not self._is(","):
                return found

    def _key(self) -> str | None:
        self._skip()
        if any(self._text.startswith(mark, self._at) for mark in (self._quote, "'", '"')):
            return str(self._value())
        name = _NAME.match(self._text, self._at)
        if name is None:
            return None
        self._at = name.end()
        return name[1]

    def _value(self) -> Any:
        self._skip()
        for mark in dict.fromkeys((self._quote, "'", '"')):
            if self._text.startswith(mark, self._at):
                return self._string(mark)
        if self._is("["):
            items: list[Any] = []
            while not self._is("]"):
                items.append(self._value())
                if not self._is(","):
                    self._take("]")
                    break
            return items
        if self._is("{"):
            found = self.pairs(":")
            self._take("}")
            return found
        plain = _PLAIN.match(self._text, self._at)
        if plain is None or plain.end() == len(self._text):
            raise _CutError
        self._at = plain.end()
        word = plain[0]
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        with suppress(ValueError):
            return json.loads(word)
        return word

    def _string(self, mark: str) -> str:
        if mark not in _QUOTED:
            begin, end = self._at + len(mark), self._text.find(mark, self._at + len(mark))
            if end < 0:
                raise _CutError
            self._at = end + len(mark)
            return self._text[begin:end]
        found = _QUOTED[mark].match(self._text, self._at)
        if found is None:
            raise _CutError
        self._at = found.end()
        with suppress(ValueError, SyntaxError):
            return str(ast.literal_eval(found[0].replace("\n", "\\n").replace("\r", "\\r")))
        return found[1]

    def _skip(self) -> None:
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it always matches

    def _is(self, mark: str) -> bool:
        self._skip()
        here = self._text.startswith(mark, self._at)
        self._at += len(mark) * here
        return here

    def _take(self, mark: str) -> None:
        if not self._is(mark):
            raise _CutError
