"""Learns how a model writes calls of tools from its chat template, which writes earlier calls as the model does.

The template writes a reply that is a text, one call, two calls, and calls with other arguments. What differs is the
format. It is used only if its reader finds in what the template has written the very calls that were given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.server.notations import KEY, KIND, Inline, Notation, Pairs
from sakiyomi.server.tools import CallWay, ToolFormat, ToolReader

Write = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""What a template makes of messages and tools; whether it begins a new reply behind them.

Raises:
    InputError: it does not take them.
"""
Call = tuple[str, Mapping[str, Any]]
LEAD = "<|python_tag|>"
"""What Meta's models may write before a call that has no mark (vLLM, tool_parsers/llama_tool_parser.py)."""
LEARNT = "learnt"
"""Stands in ``ToolFormat.models``."""

FIRST, SECOND, SAID = "toolone", "tooltwo", "SAIDTEXT"
IDS = ("call0aaaa", "call1bbbb")  # nine letters and digits, as Mistral's templates want them
ONE, TWO = {"argone": "valueone", "argtwo": 2718}, {"argone": "valuetwo"}
KINDS: Mapping[str, Any] = {
    "string": "valueone", "number": 2718, "boolean": True, "null": None, "array": [2718], "object": {"inner": 2718},
}  # fmt: skip
ODD = {"argone": 'a <b> & "c", d\n  e', "argtwo": -1}
NESTED = {"argtwo": 1, "arglist": ["x", "y"], "argdict": {"inner": {"deep": "z"}}, "argbool": True}
_PROPERTIES: Mapping[str, Any] = {
    "argone": {"type": "string", "description": "d"},
    "argtwo": {"type": "integer", "description": "d"},
    "arglist": {"type": "array", "description": "d", "items": {"type": "string"}},
    "argdict": {"type": "object", "description": "d", "additionalProperties": {"type": "string"}},
    "argbool": {"type": "boolean", "description": "d"},
}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["argone"]}
_SCHEMAS: Mapping[str, Mapping[str, Any]] = {FIRST: _PARAMETERS, SECOND: _PARAMETERS}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in _SCHEMAS.items()
)
ASKED = {"role": "user", "content": "QUESTION"}
WAYS = tuple(CallWay(texts, silent) for silent in ("absent", "empty", "null") for texts in (False, True))


def learnt(write: Write) -> ToolFormat | None:
    """The format of a template's calls; None: it writes none, or none that can be learnt."""
    for way in WAYS:
        replies = _Replies(write, way)
        with suppress(_NoCallsError, ValueError):  # a ValueError: the template leaves out a part of a call
            for form in _candidates(replies):
                form = replace(form, way=way, lead="" if form.opening else LEAD)
                if _proven(form, replies):
                    return form
    return None


def way_of_calls(write: Write) -> CallWay | None:
    """How a template takes earlier calls; None: it leaves them out."""
    for way in WAYS:
        with suppress(_NoCallsError):
            _Replies(write, way).of((FIRST, ONE))
            return way
    return None


class _NoCallsError(Exception):
    """The template writes no such calls."""


class _Replies:
    """What the template writes of a reply: where it differs from a reply that is a text.

    Args:
        write: the template.
        way: how it is given calls.
    """

    def __init__(self, write: Write, way: CallWay) -> None:
        self._write, self._way = write, way
        self._said = self._all({"content": SAID})
        self._asked = ""
        with suppress(InputError):
            self._asked = write([ASKED], TOOLS, True)

    def _all(self, reply: Mapping[str, Any]) -> str:
        with suppress(InputError):
            found = self._write([ASKED, {"role": "assistant", **reply}], TOOLS, False)
            return _NUMBER.sub("{number}", re.sub("|".join(IDS), "{id}", found))
        return ""

    def of(self, *calls: Call) -> str:
        """A reply with calls.

        Raises:
            _NoCallsError: the template leaves them out, or does not take them.
        """
        made = [
            {
                "id": id_,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(values) if self._way.texts else values},
            }
            for id_, (name, values) in zip(IDS, calls, strict=False)
        ]
        found = self._all({**self._way.content, "tool_calls": made})
        if all(name in found for name, _ in calls) and self._said:
            begin = len(same_begin(self._said, found))
            if found.startswith(self._asked):
                whole = _WHOLE.match(found, len(self._asked), max(begin, len(self._asked)))
                begin = len(self._asked) if whole is None else whole.end()
            part = found[begin:]
            part = part[: len(part) - len(_same_end(self._said[begin:], part))]
            opening, _, closing = self._said.rpartition(SAID)
            if opening.removeprefix(self._asked):  # the text, which is empty here, is between marks
                part = part[len(same_begin(closing, part)) :]
            if all(name in part for name, _ in calls):
                return part
        raise _NoCallsError

    def recipient(self, opening: str) -> str:
        """What the template writes before a text, if its prompts end with this opening."""
        if not self._asked.endswith(opening) or not self._said.startswith(self._asked):
            return ""
        return self._said[len(self._asked) :].partition(SAID)[0]


_WHOLE = re.compile(r".*[>\]\n]", re.DOTALL)
_NUMBER = re.compile(r"(?<=[\"':])\d(?=[\"'<])")


def _same(*texts: str) -> str:
    """The longest text that all of them begin with."""
    first, last = min(texts), max(texts)
    return first[: next((n for n, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))]


def same_begin(*texts: str) -> str:
    """What texts begin with, up to the last mark that all of them have whole."""
    same = _same(*texts)
    cut = same.rfind("<")
    return same[:cut] if cut > same.rfind(">") else same


def _same_end(*texts: str) -> str:
    """What texts end with, from the first mark that all of them have whole.

    A mark may be a word between two others.
    """
    same = _same(*(text[::-1] for text in texts))[::-1]
    cut = same.find(">")
    same = same[cut + 1 :] if cut >= 0 and not 0 <= same.find("<") < cut else same
    worded = all(re.search(r">\w+\Z", text[: len(text) - len(same)]) for text in texts)
    return re.sub(r"\A<[^<>]*>", "", same) if worded else same


# ---------------------------------------------------------------- what could be the format


@dataclass(frozen=True)
class _Place:
    """A call in a reply: from its name's beginning or, as one object, its brace, to the end of its arguments.

    Attributes:
        inner: the call, with {name} and {arguments} in it.
    """

    begin: int
    end: int
    inner: str


def _candidates(replies: _Replies) -> Iterator[ToolFormat]:
    one = replies.of((FIRST, ONE))
    two = ""
    with suppress(_NoCallsError):
        two = replies.of((FIRST, ONE), (SECOND, TWO))
    for find in (_as_object, _as_named_object):
        if (place := find(one, FIRST, ONE)) is not None:
            other = find(two, SECOND, TWO) if two else None
            first = find(two, FIRST, ONE) if other else None
            between = two[first.end : other.begin] if first and other and not place.begin else ""
            if between and (recipient := replies.recipient(between)):
                yield ToolFormat(LEARNT, (), between, call=place.inner, recipient=recipient)
                return
            yield _format(one, place, two, first, other, None)
            return
    yield from _one_by_one(replies, one, two)


def _as_object(text: str, name: str, values: Mapping[str, Any]) -> _Place | None:
    """A call that is an object of JSON."""
    at = text.find(f'"{name}"')
    for brace in reversed([mark.start() for mark in re.finditer("{", text[: max(at, 0)])]):
        with suppress(ValueError):
            value, length = json.JSONDecoder().raw_decode(text[brace:])
            call = _fields(value, name, values)
            if call is not None:
                return _Place(brace, brace + length, call)
    return None


def _fields(value: Mapping[str, Any], name: str, values: Mapping[str, Any]) -> str | None:
    """An object of a call, with the parts of a call in their places; None: it is none."""
    if value == {name: values}:
        return '{"{name}": {arguments}}'
    parts = []
    for key, each in value.items():
        if each == name:
            part = '"{name}"'
        elif each == values:
            part = "{arguments}"
        elif each == "{id}":  # given by the server: models need not write them
            continue
        else:
            part = json.dumps(each)
        parts.append(f"{json.dumps(key)}: {part}")
    whole = "{" + ", ".join(parts) + "}"
    return whole if "{name}" in whole and "{arguments}" in whole else None


def _as_named_object(text: str, name: str, values: Mapping[str, Any]) -> _Place | None:
    """A name, and behind it arguments as an object of JSON."""
    at = text.find(name)
    for brace in [mark.start() for mark in re.finditer("{", text[max(at, 0) :])]:
        with suppress(ValueError):
            value, length = json.JSONDecoder().raw_decode(text[at + brace :])
            if value == values:
                middle = text[at + len(name) : at + brace]
                return _Place(at, at + brace + length, "{name}" + middle + "{arguments}")
    return None


def _one_by_one(replies: _Replies, one: str, two: str) -> Iterator[ToolFormat]:
    """Arguments in pairs, or as in a program."""
    none, alone = replies.of((FIRST, {})), replies.of((FIRST, {"argone": "valueone"}))
    ends = none[none.index(FIRST) + len(FIRST) :]  # what is behind the name without arguments
    behind = alone[alone.index(FIRST) + len(FIRST) :]
    begun, _, tail = behind.partition("argone")
    middle = same_begin(ends, begun)
    before = begun[len(middle) :]
    if not tail or "valueone" not in tail:
        return
    named, _, rest = tail.partition("valueone")
    after = rest[: len(rest) - len(ends) + len(middle)].rstrip()
    for notation in _notations(replies, before, named, after):
        place = _place(one, FIRST, middle, ends)
        if place is None:
            continue
        first, other = _place(two, FIRST, middle, ends, SECOND), _place(two, SECOND, middle, ends)
        yield _format(one, place, two, first, other, notation)


def _place(text: str, name: str, middle: str, ends: str, following: str = "") -> _Place | None:
    """A call whose arguments end where what follows without arguments begins."""
    at = text.find(name)
    if at < 0:
        return None
    tail = ends[len(middle) :]
    end = text.find(following, at + 1) if following else len(text)
    mark = _first_mark(tail)
    stop = text.rfind(mark, at, end) if following else len(text) - len(tail)
    return _Place(at, stop, "{name}" + middle + "{arguments}") if stop >= at else None


def _first_mark(text: str) -> str:
    """The first mark of a text, or its first word."""
    found = re.match(r"\s*(<[^<>]*>|\S+?(?=<|$))", text)
    return found[1] if found is not None else text


def _notations(replies: _Replies, before: str, named: str, after: str) -> Iterator[Notation]:
    """How single arguments may be written.

    Args:
        replies: of the template.
        before: the first argument's name.
        named: between its name and its value, which is a string.
        after: behind the value, up to what stands there without arguments.
    """
    others = replies.of((FIRST, {"argtwo": 2718}))
    behind = others[others.index("argtwo") + len("argtwo") :]
    plain = behind[: behind.index("2718")]
    if named != plain and named.startswith(plain) and after.startswith(named[len(plain) :]):
        quote, both, word = named[len(plain) :], replies.of((FIRST, ONE)), replies.of((FIRST, {"argone": True}))
        between = both[both.index("valueone") + len("valueone" + quote) : both.index("argtwo")]
        turned = replies.of((FIRST, dict(reversed(ONE.items()))))
        yield Inline(plain, between, quote, "True" in word, turned.index("argone") < turned.index("argtwo"))
        return
    kinds = {}
    if named != plain:
        start = len(_same(named, plain))
        for kind, value in KINDS.items():
            written = replies.of((FIRST, {"argone": value}))
            typed = re.match(r"\w+", written[written.index("argone") + len("argone") + start :])
            if typed is None:
                return
            kinds[kind] = typed[0]
        named = named[:start] + KIND + named[start + len(kinds["string"]) :]
    pad = "\n" if named.endswith("\n") and after.startswith("\n") else ""
    named = named[: len(named) - len(pad)]
    after = after.removeprefix(pad).replace("argone", KEY)
    opened = ""
    if (found := re.fullmatch(r"(.*?\S)\s*(<[^<>]+>)", named, re.DOTALL)) is not None and not kinds:
        named, opened = found[1], found[2]
    yield Pairs(before.lstrip(), named, after, opened, pad, kinds)


# ---------------------------------------------------------------- marks around calls


def _format(
    one: str, place: _Place, two: str, first: _Place | None, other: _Place | None, notation: Notation | None
) -> ToolFormat:
    """A format from one call, and from two if the template takes so many."""
    whole = place.inner.startswith('{"')
    before, after = one[: place.begin], one[place.end :].rstrip()
    between = two[first.end : other.begin] if first and other else None
    head, tail, apart = "", "", False
    listed = before.rstrip().endswith("[") and "]" in after and (between is None or "," in between)
    if listed:
        before = before.rstrip()[:-1]
        tail, _, after = after.partition("]")
    elif between is not None:
        same = _same_end(between, before)
        rest = between[: len(between) - len(same)].rstrip()
        apart = same.strip() != before.strip()
        if apart and other:  # some templates close several calls and not one
            after = max(after, two[other.end :].rstrip(), key=len)
        if apart:
            head, tail, after = same.lstrip(), rest, after.lstrip().removeprefix(rest.lstrip())
        elif whole:
            after = rest
        else:
            head, tail, after = _split(before, rest)
    elif not whole:
        head, tail, after = _split(before, after)
    opening = before[: len(before) - len(head)] if head else before
    closing = _ADJACENT.sub(r"\1", after)
    pad = "\n" if opening.endswith("\n") and (tail.endswith("\n") or closing.startswith("\n")) else ""
    pad = " " if listed and opening.endswith(" ") else pad
    tail = tail.removesuffix(pad)
    call = head.replace(FIRST, "{name}") + place.inner + tail.replace(FIRST, "{name}")
    return ToolFormat(LEARNT, (), opening.strip(), closing.strip(), pad, call, listed, apart, pairs=notation)


_ADJACENT = re.compile(r"(.*?\S>)<.*", re.DOTALL)
"""Marks behind a closing one, which end the reply."""


def _split(before: str, after: str) -> tuple[str, str, str]:
    """Of the marks around a call: what belongs to the call itself, before it and after it, and the closing one."""
    opening = re.match(r"\s*(<[^<>\s]+>|\[[A-Z_]+\])", before)
    head = "" if opening is None else before[opening.end() :].lstrip()
    closing = re.search(r"(<[^<>\s]+>)\s*$", after)
    if closing is None or (head and not after[: closing.start()].strip()):
        return head, after, ""
    return head, after[: closing.start()], closing[1]


# ---------------------------------------------------------------- proof


def _proven(form: ToolFormat, replies: _Replies) -> bool:
    """Whether a reader of the format finds what the template was given."""
    one, two = (FIRST, ONE), (SECOND, TWO)
    probes: list[list[Call]] = [[one], [one, two], [(SECOND, ODD)], [(FIRST, {})], [(FIRST, NESTED)]]
    for calls in probes:
        try:
            text = replies.of(*calls)
        except _NoCallsError:
            if len(calls) == 1:
                return False
            continue
        text += form.closing if form.closing not in text and len(calls) == 1 else ""
        reader = ToolReader(form, schemas=_SCHEMAS)
        plain, found = reader.push(text.replace("{id}", IDS[0]).replace("{number}", "0"), True)
        read = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]
        if read != calls or SAID in plain or any(name in plain for name in (FIRST, SECOND)):
            return False
    return True
