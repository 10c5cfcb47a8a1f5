"""Tool calls: the formats in which models write them, and a reader that finds them in a stream of text.

A new format is one entry of ``tool_formats.toml``.
"""

from __future__ import annotations

import json
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from sakiyomi.core.text import profile
from sakiyomi.server.errors import unsupported
from sakiyomi.server.fields import value_of
from sakiyomi.server.schema import function

Schemas = Mapping[str, Mapping[str, Any]]
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
"""Of messages in channels."""


@dataclass(frozen=True)
class Pairs:
    """Arguments one by one: ``{before}KEY{named}{opened}{pad}VALUE{pad}{after}``; strings as plain text, the rest JSON.

    Line feeds between the marks are optional.
    """

    before: str
    named: str
    after: str
    opened: str = ""
    pad: str = ""

    def read(self, text: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
        """Arguments at the beginning of a text, and the rest; None: they are incomplete."""
        found: dict[str, Any] = {}
        while (rest := text.lstrip()).startswith(self.before):
            key, named, rest = rest[len(self.before) :].partition(self.named)
            rest = rest.lstrip() if self.opened else rest
            value, ended, text = rest.removeprefix(self.opened).partition(self.after)
            if not (named and ended and rest.startswith(self.opened)):
                return None
            found[key.strip()] = value_of(value.removeprefix(self.pad).removesuffix(self.pad), schema, key.strip())
        return found, text


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: ``{opening}{pad}{"name": NAME, "arguments": ARGUMENTS}{pad}{closing}``.

    Attributes:
        models: that use the format.
        signs: strings that all occur in the chat template of these models.
        foreign: strings that must not occur in the template; they mark a different format.
        opening: mark before calls; "" if a reply that begins with such an object is a call.
        closing: mark after them.
        pad: written inside the marks; read as any white space.
        arguments: the object's field for the arguments.
        listed: one opening is followed by a JSON list of calls; otherwise each call has its own opening.
        divider: written between a name and its arguments; "" if both are fields of one object.
        each: marks around each call between opening and closing; "" if opening and closing surround one call.
        before: written before a name, with a divider.
        numbered: a name is followed by a colon and the call's number; together with ``before`` they are the call's id,
            which the template takes back.
        after: written after arguments, with a divider.
        texts: the template takes arguments of earlier calls as JSON text, not as an object.
        lead: may precede a call that has no opening.
        pairs: the format of arguments that are not an object; a name is followed by ``divider`` then, too.
        channels: the whole reply consists of messages in channels, see ``thoughts.py``; other attributes are unused.
    """

    models: str
    signs: tuple[str, ...]
    opening: str = ""
    closing: str = ""
    pad: str = ""
    arguments: str = "arguments"
    listed: bool = False
    divider: str = ""
    each: tuple[str, str] = ("", "")
    before: str = ""
    numbered: bool = False
    after: str = ""
    texts: bool = False
    lead: str = ""
    foreign: tuple[str, ...] = ()
    pairs: Pairs | None = None
    channels: bool = False

    @property
    def marks(self) -> list[str]:
        """Marks that may be single tokens."""
        if self.channels:
            return list(MARKS)
        pairs = (self.pairs.before, self.pairs.named, self.pairs.opened, self.pairs.after) if self.pairs else ()
        inner = [mark for text in (self.before, self.divider, self.after, *pairs) for mark in _MARK.findall(text)]
        return [mark for mark in (self.opening, self.closing, *self.each, *inner, self.lead) if mark]

    def around(self, name: str) -> tuple[str, str]:
        """The text before the arguments of a call, up to its number if it has one, and the text after them."""
        if self.divider or self.pairs is not None:
            begin = self.each[0] + self.before + name
            return begin + (":" if self.numbered else self.divider), self.after + self.each[1]
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": ', "}"

    def read(self, text: str, schemas: Schemas) -> tuple[list[tuple[str, Any]], str] | None:
        """Names and arguments of the calls at the beginning of a text after the opening, and the rest.

        Names include their numbers in numbered formats. None: the calls are incomplete, or there is none.
        """
        if not self.each[0]:
            return self._read(text, schemas)
        calls: list[tuple[str, Any]] = []
        while (text := text.lstrip()).startswith(self.each[0]):
            if (found := self._read(text[len(self.each[0]) :], schemas)) is None:
                return None
            calls, text = calls + found[0], found[1]
        return (calls, text[len(self.closing) :]) if calls and text.startswith(self.closing) else None

    def _read(self, text: str, schemas: Schemas) -> tuple[list[tuple[str, Any]], str] | None:
        """Calls after an opening, or after a call's own mark, and the rest."""
        found = self._object(text) if self.pairs is None else self._pairs(self.pairs, text, schemas)
        if found is None:
            return None
        calls, rest = found
        own = self.after + self.each[1]
        for mark in (self.after, self.closing) if self.pairs is not None else (own or self.closing,):
            mark, rest = mark.lstrip(), rest.lstrip() if mark else rest
            if not rest.startswith(mark):
                return None
            rest = rest[len(mark) :]
        return calls, rest

    def _object(self, text: str) -> tuple[list[tuple[str, Any]], str] | None:
        name, _, rest = text.partition(self.divider) if self.divider else ("", "", text)
        name = name.strip().removeprefix(self.before)
        try:
            value, end = _decode(rest := rest.lstrip())
            values = value if self.listed else [value]
            calls = [(name, value)] if self.divider else [(each["name"], each[self.arguments]) for each in values]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return calls, rest[end:]

    def _pairs(self, pairs: Pairs, text: str, schemas: Schemas) -> tuple[list[tuple[str, Any]], str] | None:
        named = re.match(rf"\s*{re.escape(self.before)}([^<>\s]+)\s*{re.escape(self.divider)}", text)
        found = pairs.read(text[named.end() :], schemas.get(named[1], {})) if named is not None else None
        return None if named is None or found is None else ([(named[1], found[0])], found[1])


_MARK = re.compile("<[^<>]+>")
_decode = json.JSONDecoder().raw_decode


def _formats() -> Iterator[ToolFormat]:
    entries = tomllib.loads(files("sakiyomi.server").joinpath("tool_formats.toml").read_text(encoding="utf-8"))
    for entry in entries["format"]:
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in entry.items()}
        if "pairs" in entry:
            values["pairs"] = Pairs(**entry["pairs"])
        yield ToolFormat(**values)


FORMATS = tuple(_formats())
"""All formats; the first one that fits a chat template is used."""


def _fitting(template: str) -> ToolFormat | None:
    for form in FORMATS:
        if all(sign in template for sign in form.signs) and not any(sign in template for sign in form.foreign):
            return form
    return None


def in_channels(template: str) -> ToolFormat | None:
    """The format of a template whose replies are in channels, with or without tools; None: it has no channels."""
    return form if (form := _fitting(template)) is not None and form.channels else None


def takes_texts(template: str) -> bool:
    """Whether a template takes arguments of earlier calls as JSON text."""
    return (form := _fitting(template)) is not None and form.texts


def tool_format(template: str) -> ToolFormat:
    """The format of calls for this template.

    Raises:
        ApiError: the format is unknown.
    """
    if (form := _fitting(template)) is not None:
        return form
    if not template:
        raise unsupported("the model has no chat template that could describe tools to it; leave tools out", "tools")
    raise unsupported(
        "the model's chat template uses a format of tool calls that this server does not know; it knows those of "
        f"{', '.join(form.models for form in FORMATS)}. Leave tools out, or start the server with a --chat-template of "
        "one of these",
        "tools",
    )


def shown(marks: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens among marks: decoding must keep them for the reader."""
    special = profile(tokenizer).special
    found = zip(marks, tokenizer.convert_tokens_to_ids(list(marks)), strict=True)
    return frozenset(i for mark, i in found if i in special and tokenizer.convert_ids_to_tokens(i) == mark)


class ToolReader:
    """Separates calls from the text of a reply while it is written.

    Args:
        form: the format of calls.
        names: makes ids of calls.
        schemas: of each tool's arguments, for formats that write values as text.
        begun: the text continues a reply.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Callable[[int], str] = secrets.token_hex,
        schemas: Schemas | None = None,
        *,
        begun: bool = False,
    ) -> None:
        self._form, self._names, self._schemas = form, names, schemas or {}
        self._pending = ""
        self._end = (form.closing or ("]" if form.listed else "}"))[-1]
        self._begun = begun  # whether text was given: then a form without opening has no calls any more
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """New text that is no call, and newly completed calls; ``last``: the reply is over.

        Calls that are incomplete at the end are text.
        """
        self._pending += text
        plain, before = "", len(self.calls)
        while (place := self._place()) is not None:
            start, inner = place
            # A call can only be complete after its end mark.
            found = self._form.read(self._pending[inner:], self._schemas) if last or self._end in text else None
            if found is None and not last:
                plain, self._pending = plain + self._pending[:start], self._pending[start:]
                return self._given(plain), self.calls[before:]
            if found is None:
                plain, self._pending = plain + self._pending[:inner], self._pending[inner:]
                self._begun = True
                continue
            plain += self._pending[:start]
            self._begun, self._pending = True, found[1]
            self._add(found[0])
        keep = 0 if last else self._beginning()
        plain += self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(self._pending) - keep :]
        return self._given(plain), self.calls[before:]

    def _given(self, plain: str) -> str:
        self._begun = self._begun or bool(plain)
        if not self.calls:
            return plain
        return "" if plain.isspace() else plain.strip("\n")

    def _place(self) -> tuple[int, int] | None:
        """Where possible calls begin, and where their opening ends."""
        mark = self._form.opening
        if mark:
            start = self._pending.find(mark)
            return None if start < 0 else (start, start + len(mark))
        if self._begun:
            return None
        inner = len(self._pending) - len(self._pending.lstrip().removeprefix(self._form.lead).lstrip())
        return (0, inner) if self._pending[inner:].startswith("{") else None

    def _beginning(self) -> int:
        """Characters at the end that may begin a call."""
        mark = self._form.opening
        if mark:
            return next((n for n in range(len(mark) - 1, 0, -1) if self._pending.endswith(mark[:n])), 0)
        text = self._pending.lstrip()
        ahead = text.removeprefix(self._form.lead).strip() == "" or self._form.lead.startswith(text)
        return len(self._pending) if ahead and not self._begun else 0

    def _add(self, calls: Sequence[tuple[str, Any]]) -> None:
        for name, arguments in calls:
            id_ = self._names(5)[:9]  # nine letters and digits: Mistral's templates take no other ids back
            if self._form.numbered:
                id_, name = self._form.before + name, name.rpartition(":")[0]
            self.calls.append(called(len(self.calls), id_, name, json.dumps(arguments, ensure_ascii=False)))


def called(index: int, id_: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a reply."""
    return {"index": index, "id": id_, **function(name, arguments=arguments)}
