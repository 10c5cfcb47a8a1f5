"""Rules for replies with calls of tools, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sakiyomi.server.channels import Channels
from sakiyomi.server.errors import unsupported
from sakiyomi.server.inline_rules import InlineRules
from sakiyomi.server.notations import Inline, Pairs
from sakiyomi.server.pair_rules import GAP, PairRules, Value
from sakiyomi.server.schema import FunctionTool
from sakiyomi.server.tools import ToolFormat

PLACES = {"{number}": "/[0-9]{1,3}/", "{id}": "/[a-zA-Z0-9]{9}/"}
LAYOUT_GAP = r"[ \n]{0,8}"  # between the calls of a list
MOST_CALLS = 16  # of a reply that must call, or of a list
TEXT = "TEXT: /(.|\\n)*/\n"


class ReplyRules:
    """Rules for text with calls, in llguidance's dialect of Lark.

    A mark that is a special token is written as that token.

    Args:
        marks: names and ids of these tokens.
        form: how calls are written.
        stop_ids: tokens that end a text.
        value: makes a rule for values of a schema.
    """

    def __init__(self, marks: dict[str, int], form: ToolFormat, stop_ids: Sequence[int], value: Value) -> None:
        self._marks, self._form, self._stop_ids, self._value = marks, form, stop_ids, value
        # Text may have other such tokens in it, <think> for instance.
        self._other = self._tokens(mark for mark in marks if mark not in form.marks)

    def calls(self, tools: Sequence[FunctionTool], several: bool) -> str:
        """``body``: the text after the opening; ``bared``: after the mark of a call whose opening is left out."""
        form = self._form
        gap = f"/{LAYOUT_GAP}/" if form.is_object else ""  # objects may stand in lines of their own
        more = MOST_CALLS - 1 if several else 0
        call = f"({gap} call {gap}){{1,{more + 1}}}" if form.apart else "call"
        if form.listed:
            comma = f'"," {gap}' if gap else '", "'
            call = f"call ({comma} call){{0,{more}}}" if more else "call"
            call = f'"[" {gap} {call} {gap} "]"'
        pad = f"/{json.dumps(form.pad)[1:-1]}?/" if form.pad else ""
        end = f"{pad} {self._words(form.closing)}" if form.closing else ""
        lark = f"body: {pad} {call} {end}\n"
        if form.bare:
            lark += f"bared: rest {f'call{{0,{more}}}' if form.apart and more else ''} {end}\n" + _one_of("rest", tools)
        return lark + _one_of("call", tools) + self._each(tools)

    def _each(self, tools: Sequence[FunctionTool]) -> str:
        """``call_0``, ``call_1``, ...: a call of each tool; ``rest_0``, ...: without the mark that tells a bare one."""
        form = self._form
        rules: PairRules | InlineRules | None = None
        if isinstance(form.pairs, Pairs):
            rules = PairRules(form.pairs, self._words, self._value)
        elif isinstance(form.pairs, Inline):
            rules = InlineRules(form.pairs, self._words)
        lark = "" if rules is None else rules.shared
        for i, tool in enumerate(tools):
            before, after = form.around(tool.function.name)
            if rules is None:
                arguments = self._value(parameters_of(tool))
            else:
                gap = GAP if isinstance(form.pairs, Pairs) else ""
                before = before.removesuffix("\n") if gap else before
                arguments = f"{gap} call_{i}_arguments"
                lark += rules.of(f"call_{i}", tool.function.parameters, f"tools.{tool.function.name}")
            before = before.removeprefix(form.bare)
            lark += f"call_{i}: {self._words(form.bare)} rest_{i}\n"
            lark += f"rest_{i}: {self._words(before)} {arguments} {self._words(after)}\n"
        return lark

    def channels(
        self,
        channels: Channels,
        tools: Sequence[FunctionTool] = (),
        *,
        forced: bool = False,
        several: bool = False,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """A reply in channels: thoughts, then calls or the reply, which may have a schema.

        Raises:
            ApiError: the tokenizer has no special tokens for the marks.
        """
        if missing := [mark for mark in channels.marks if mark not in self._marks]:
            raise unsupported(
                f"the template writes replies in channels, and the tokenizer has no token {missing[0]}; leave tools "
                "and response_format out",
                "tools" if tools else "response_format",
            )
        form, words = self._form, self._words
        body, again = words(channels.body), words(channels.over + channels.start)
        lark = TEXT + f"before: {self._any(channels.before)} {body} TEXT {again}\n"
        said = "TEXT" if schema is None else self._value(schema)
        endings = [] if forced else [f"{words(channels.text)} {body} {said}"]
        if tools:
            more = f"({again} message){{0,{MOST_CALLS - 1}}}" if several and channels.several else ""
            endings.append(f"message {more} {self._any(channels.ends)}?")
            lark += _one_of("message", tools) + self._each(tools)
        for i, tool in enumerate(tools):
            head = self._any([each.replace("{name}", tool.function.name) for each in channels.calls])
            call = f"{words(form.opening + form.pad)} call_{i} {words(form.pad + form.closing)}"
            lark += f"message_{i}: {head} {body} {call}\n"
        return lark + f"start: before* ({' | '.join(endings)})\n"

    def _any(self, texts: Sequence[str]) -> str:
        return f"({' | '.join(map(self._words, texts))})"

    def start(self, forced: bool, several: bool) -> str:
        """``start``: a reply that must call, or one that may."""
        form, opening = self._form, self._words(self._form.opening)
        more = f"({opening} body){{0,{MOST_CALLS - 1}}}" if several else ""
        after = f"body {more}" if form.recipient else ""
        if forced and after:
            return f"start: {after}\n"
        if not opening:
            lead = f"({self._words(form.lead)})?" if form.lead in self._marks else ""
            plain = '\nCALLED: /\\s*\\{\\s*"name"(.|\\n)*/\nPLAIN: TEXT & ~CALLED\n'
            return f"start: {lead} body" + ("\n" if forced else f" | PLAIN {self._behind('TEXT')} {plain}{TEXT}")
        if forced:
            apart = several and not form.listed and not form.apart
            more = f'("\\n"? {opening} body){{0,{MOST_CALLS - 1}}}' if apart else ""
            return f"start: {opening} body {more}\n"
        ways, free = self._ways()
        some = f"({ways})" + ("* free" if several else " | free")
        return f"start: {some}{free}" if not after else f"start: {self._words(form.recipient)} ({some}) | {after}{free}"

    def _ways(self) -> tuple[str, str]:
        """How text goes on to a call and what follows its mark, and the rules that this needs, with ``free`` text."""
        begins = {"opening": self._parts(self._form.opening), "bare": self._parts(self._form.bare)}
        rules, found = f"\nfree: TEXT {self._behind('TEXT')}\n{TEXT}", []
        for name, (first, *rest) in ((name, parts) for name, parts in begins.items() if parts):
            if first.startswith("<["):
                begun = f"free {first}"
            else:  # The mark is letters like others: as soon as they stand there, they are a mark.
                rules += f"{name}[lazy]: TEXT {first}\n"
                begun = (f"(TEXT <[{self._other}]>)* " if self._other else "") + name
            found.append(" ".join([begun, *rest, "body" if name == "opening" else "bared"]))
        first, *rest = begins["opening"]
        if first.startswith("<[") and rest and not rest[0].startswith("<["):  # text has such tokens around other words
            others = self._tokens(mark for mark, i in self._marks.items() if f"<[{i}]>" != first)
            words = [f"~({' '.join([*parts[1:2], 'TEXT'])})" for parts in begins.values() if parts[:1] == [first]]
            rules = f"\nfree: TEXT (<[{others}]> TEXT | {first} OTHER)*\nOTHER: TEXT & {' & '.join(words)}\n{TEXT}"
        return " | ".join(found), rules

    def _behind(self, text: str) -> str:
        return f"(<[{self._other}]> {text})*" if self._other else ""

    def _tokens(self, marks: Iterable[str]) -> str:
        """Ids of marks that end no text."""
        return ",".join(str(self._marks[mark]) for mark in marks if self._marks[mark] not in self._stop_ids)

    def _words(self, text: str) -> str:
        return " ".join(self._parts(text))

    def _parts(self, text: str) -> list[str]:
        symbols = {mark: f"<[{i}]>" for mark, i in self._marks.items()} | PLACES
        known = "|".join(map(re.escape, sorted(symbols, key=len, reverse=True)))
        return [symbols.get(part) or json.dumps(part) for part in re.split(f"({known})", text) if part]


def _one_of(rule: str, tools: Sequence[FunctionTool]) -> str:
    return f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(tools)))}\n"


def parameters_of(tool: FunctionTool) -> Mapping[str, Any]:
    """Its parameters, which are always an object."""
    return {"type": "object", **tool.function.parameters}
