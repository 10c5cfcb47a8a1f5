"""Tool calls: the formats in which models write them, and a reader that finds them in a stream of text.

Most are learnt from the chat template, see ``learnt_format.py``; ``tool_formats.toml`` lists the others.
"""

from __future__ import annotations

import json
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from sakiyomi.core.text import profile
from sakiyomi.server.channels import Channels, single
from sakiyomi.server.notations import Inline, Notation, Pairs
from sakiyomi.server.said import partial
from sakiyomi.server.schema import function

Schemas = Mapping[str, Mapping[str, Any]]


class CallWay(NamedTuple):
    """How a chat template takes earlier calls.

    Attributes:
        texts: arguments as JSON text, not as an object.
        silent: what the content of a message is that has calls alone: absent, as transformers has it, the empty text,
            or null.
    """

    texts: bool = False
    silent: Literal["absent", "empty", "null"] = "absent"

    @property
    def content(self) -> dict[str, Any]:
        """The content of a message that has calls alone, by its name."""
        return {} if self.silent == "absent" else {"content": "" if self.silent == "empty" else None}


USUAL = CallWay()


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: ``{opening}{pad}{call}{pad}{closing}``.

    Attributes:
        models: that use the format.
        signs: strings that all occur in the chat template of these models.
        opening: mark before calls; "" if a reply that begins with a call's first character is a call.
        closing: mark after them.
        pad: written inside the marks; read as any white space.
        call: one call, with {name} and {arguments} in it, {number} where calls are numbered, and {id} where the model
            gives them one. White space is read as any other; a call that is a JSON object may have other fields too, in
            any order, and its one field may be the name.
        listed: one opening is followed by a JSON list of calls.
        apart: one opening is followed by calls one after the other. Otherwise each call has its own opening.
        way: how the template takes earlier calls; None: it leaves them out.
        lead: may precede a call that has no opening.
        recipient: written before a reply that is a text; the prompt ends with the opening then. "" for most models.
        pairs: the format of arguments that are not an object of JSON.
        channels: the whole reply consists of messages in channels, and calls are messages. None for most models.
    """

    models: str
    signs: tuple[str, ...]
    opening: str = ""
    closing: str = ""
    pad: str = ""
    call: str = '{"name": "{name}", "arguments": {arguments}}'
    listed: bool = False
    apart: bool = False
    way: CallWay | None = USUAL
    lead: str = ""
    recipient: str = ""
    pairs: Notation | None = None
    channels: Channels | None = None

    @property
    def is_object(self) -> bool:
        """Whether a call is one object of JSON."""
        return self.pairs is None and self.call.startswith('{"')

    @property
    def marks(self) -> list[str]:
        """Marks that may be single tokens."""
        around = self.channels.marks if self.channels else ()
        inner = single(self.call, *(self.pairs.marks if self.pairs else ()), self.opening, self.closing)
        whole = (self.opening, self.closing, self.lead)
        return [*dict.fromkeys((*filter(None, whole), *inner, *around))]

    @property
    def bare(self) -> str:
        """The mark with which a call itself begins, which tells it where its opening is left out; "" if it has none."""
        head = self.call.partition("{")[0]
        return head if self.opening and not self.listed and head.startswith("<") else ""

    def around(self, name: str) -> tuple[str, str]:
        """The text before the arguments of a call, with {number} in it if it has one, and the text after them."""
        begin, _, end = self.call.replace("{name}", name).partition("{arguments}")
        return begin, end

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as the model writes them, for formats whose arguments are an object of JSON or as in a program."""
        texts = []
        for number, (name, values) in enumerate(calls):
            before, after = self.around(name)
            if isinstance(self.pairs, Inline) and isinstance(values, Mapping):
                arguments = self.pairs.written(values)
            else:
                arguments = json.dumps(values, ensure_ascii=False)
            texts.append((before + arguments + after).replace("{number}", str(number)))
        body = f"[{', '.join(texts)}]" if self.listed else "".join(texts)
        return self.opening + self.pad + body + self.pad + self.closing

    def read(self, text: str, schemas: Schemas) -> tuple[list[Found], str] | None:
        """The calls at the beginning of a text after the opening, and the rest; None: they are incomplete, or none."""
        calls: list[Found | None] = []
        rest = text
        if self.listed and self.is_object:
            values, rest = _value(text) or (None, "")
            calls = [self._object(each) for each in values] if isinstance(values, list) else [None]
        else:
            more, rest = True, rest.lstrip().removeprefix("[") if self.listed else rest
            while more:
                found = self._call(rest, schemas)
                if found is None:
                    return None
                calls.append(found[0])
                rest = found[1].lstrip() if self.closing or self.listed else found[1]
                more = rest.startswith(",") if self.listed else self.apart and not rest.startswith(self.closing)
                if self.listed and not rest.startswith((",", "]")):
                    return None
                rest = rest[1:] if self.listed else rest
        rest = rest.lstrip() if self.closing else rest
        known = [call for call in calls if call is not None]
        complete = len(known) == len(calls) and rest.startswith(self.closing)
        return (known, rest[len(self.closing) :]) if complete else None

    def _call(self, text: str, schemas: Schemas) -> tuple[Found | None, str] | None:
        """The call at the beginning of a text, and the rest; None: it is incomplete, or none."""
        if self.is_object:
            found = _value(text)
            return None if found is None else (self._object(found[0]), found[1])
        head, _, tail = map(_lenient, self.call.partition("{arguments}"))
        if (begun := re.match(rf"\s*{head}", text)) is None:
            return None
        parts, rest = begun.groupdict(), text[begun.end() :]
        found = _value(rest) if self.pairs is None else self.pairs.read(rest, schemas.get(parts.get("name", ""), {}))
        ended = None if found is None else re.match(rf"\s*{tail}" if tail else "", found[1])
        if found is None or ended is None:
            return None
        return Found(parts.pop("name", ""), found[0], **parts), found[1][ended.end() :]

    def _object(self, value: Any) -> Found | None:
        """A JSON value as a call, whatever the order of its fields; further fields are ignored. None: it is no call."""
        fields = json.loads(self.call.replace("{arguments}", '"{arguments}"'))
        if not isinstance(value, dict):
            return None
        if "{name}" in fields:
            return Found(*next(iter(value.items()))) if len(value) == 1 else None
        if not fields.keys() <= value.keys():
            return None
        parts = {
            part.strip("{}"): value[field] for field, part in fields.items() if part in _PARTS or part == ARGUMENTS
        }
        found = Found(**parts | {name: str(parts[name]) for name in ("number", "id") if name in parts})
        return found if isinstance(found.name, str) else None


def _value(text: str) -> tuple[Any, str] | None:
    """The JSON value at the beginning of a text, and the rest; None: it is incomplete, or none."""
    text = text.lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return value, text[end:]


class Found(NamedTuple):
    """A call in a text; its name, number and id are "" where calls have none."""

    name: str
    arguments: Any
    number: str = ""
    id: str = ""


ARGUMENTS = "{arguments}"
_PARTS = {
    "{name}": r"\s*(?P<name>[^<>\[\](){}\s](?:[^<>\[\](){}\n]*[^<>\[\](){}\s])?)\s*",
    "{number}": r"(?P<number>\d+)",
    "{id}": r"\s*(?P<id>[\w.:-]+)\s*",
}


def _lenient(text: str) -> str:
    """A pattern of a text that may have other white space, and of its name and number."""
    words = re.split(r"(\s+|{name}|{number}|{id})", text)
    return "".join(r"\s*" if word.isspace() else _PARTS.get(word) or re.escape(word) for word in words)


_TABLES: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "pairs": ("pairs", Pairs), "inline": ("pairs", Inline), "channels": ("channels", Channels),
}  # fmt: skip


def _formats() -> Iterator[ToolFormat]:
    entries = tomllib.loads(files("sakiyomi.server").joinpath("tool_formats.toml").read_text(encoding="utf-8"))
    for entry in entries["format"]:
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in entry.items()}
        for name, (field, kind) in _TABLES.items():
            if (table := values.pop(name, None)) is not None:
                values[field] = kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in table.items()})
        yield ToolFormat(**values)


FORMATS = tuple(_formats())
"""Formats that are known beforehand; the first one that fits a chat template is used where none is learnt."""


def listed_format(template: str) -> ToolFormat | None:
    """The format of `FORMATS` for this template."""
    for form in FORMATS:
        if all(sign in template for sign in form.signs):
            return form
    return None


def in_channels(template: str) -> ToolFormat | None:
    """The format of a template whose replies are in channels, with or without tools; None: it has no channels."""
    return form if (form := listed_format(template)) is not None and form.channels else None


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
        self._head = "" if begun or not form.recipient else form.opening + form.recipient
        self._prompted = bool(self._head)  # what is pending begins with the opening, which is in the prompt
        self._pending = form.opening if self._prompted else ""
        self._end = (form.closing or ("]" if form.listed else "}"))[-1]
        self._begun = begun  # whether text was given: then a form without opening has no calls any more
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """New text that is no call, and newly completed calls; ``last``: the reply is over.

        Calls that are incomplete at the end are text.
        """
        self._pending += text
        plain, before = "", len(self.calls)
        if self._head and len(self._pending) < len(self._head) and self._head.startswith(self._pending) and not last:
            return "", []
        if self._head and self._pending.startswith(self._head):
            self._pending, self._prompted = self._pending[len(self._head) :], False
        self._head = ""
        while (place := self._place()) is not None:
            start, inner, after = place
            # A call can only be complete after its end mark.
            found = self._form.read(self._pending[inner:], self._schemas) if last or self._end in text else None
            if found is None and not last:
                plain, self._pending = plain + self._pending[:start], self._pending[start:]
                return self._given(plain), self.calls[before:]
            if found is None:
                plain += "" if self._prompted else self._pending[:after]
                self._begun, self._prompted, self._pending = True, False, self._pending[after:]
                continue
            plain, self._prompted = plain + self._pending[:start], False
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

    def _place(self) -> tuple[int, int, int] | None:
        """Where possible calls begin, where to read them, and where to go on if there are none."""
        opening, bare = self._form.opening, self._form.bare
        if opening:
            found = [(at, at + len(opening), at + len(opening))] if (at := self._pending.find(opening)) >= 0 else []
            if bare and (at := self._pending.find(bare)) >= 0:
                found.append((at, at, at + len(bare)))
            return min(found, default=None)
        if self._begun:
            return None
        inner = len(self._pending) - len(self._pending.lstrip().removeprefix(self._form.lead).lstrip())
        return (0, inner, inner) if self._pending[inner:].startswith("{") else None

    def _beginning(self) -> int:
        """Characters at the end that may begin a call."""
        if self._form.opening:
            return partial(self._pending, (self._form.opening, self._form.bare))
        text = self._pending.lstrip()
        ahead = text.removeprefix(self._form.lead).strip() == "" or self._form.lead.startswith(text)
        return len(self._pending) if ahead and not self._begun else 0

    def _add(self, calls: Sequence[Found]) -> None:
        for name, arguments, _, id_ in calls:
            id_ = id_ or self._names(5)[:9]  # nine letters and digits: Mistral's templates take no other ids back
            self.calls.append(called(len(self.calls), id_, name, json.dumps(arguments, ensure_ascii=False)))


def called(index: int, id_: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a reply."""
    return {"index": index, "id": id_, **function(name, arguments=arguments)}
