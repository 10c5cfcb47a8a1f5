"""What a chat template makes of messages, as transformers' ``apply_chat_template`` has it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from sakiyomi.core.errors import InputError
from sakiyomi.core.templates import rendered_template

Ending = Literal["new", "begun", "none"]
"""Where a prompt of messages ends: where a new reply begins, inside the last message, or behind it."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_BEGUN = "CONTINUE_FINAL_MESSAGE "
"""Marks where the last message ends. The space shows whether the template removes white space there."""


class Rendering(NamedTuple):
    """How a template writes messages.

    Attributes:
        tools: JSON schemas of tools.
        options: further values for the template, by name.
        ending: where the prompt ends.
        nulls: the template is told of values that are null; transformers leaves them out.
        begun: a mark and a text that a new reply begins with; the template may write the mark itself.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    ending: Ending = "new"
    nulls: bool = False
    begun: tuple[str, str] = ("", "")


def rendered(tokenizer: Any, template: str | None, messages: Sequence[Mapping[str, Any]], how: Rendering) -> str:
    """What a template writes, in bounded time and memory.

    Args:
        tokenizer: of transformers.
        template: a Jinja text; None: the tokenizer's own.
        messages: with their roles.
        how: see there.

    Raises:
        InputError: the template does not take the messages.
    """
    tokens = _special_tokens(tokenizer)
    write = _by_tokenizer if tokens is None else _in_process
    try:
        return write(tokenizer, template or "", messages, how)
    except InputError as error:
        if how.ending == "begun":
            write(tokenizer, template or "", messages, how._replace(ending="new"))  # else it takes no new reply either
            raise InputError(
                f"the chat template cannot continue the last message ({error}); let a new reply begin"
            ) from None
        raise


def template_of(tokenizer: Any) -> str:
    """The tokenizer's own template, by preference the one for tools."""
    if _special_tokens(tokenizer) is None:
        return str(tokenizer.get_chat_template(tools=[]))
    return _of_several(tokenizer.chat_template, tools=True)


def _in_process(tokenizer: Any, template: str, messages: Sequence[Mapping[str, Any]], how: Rendering) -> str:
    given = [_as_transformers(message, how.nulls) for message in messages]
    if how.ending == "begun":
        given[-1] = given[-1] | {"content": _marked(given[-1].get("content", ""))}
    values = {**(_special_tokens(tokenizer) or {}), **how.options, "messages": given, "tools": list(how.tools) or None}
    values |= {"documents": None, "add_generation_prompt": how.ending == "new"}
    text = _written(template or _of_several(tokenizer.chat_template, tools=bool(how.tools)), values)
    if how.ending != "begun":
        return text
    place = text.rfind(_BEGUN.strip())
    if place < 0:
        raise InputError("it leaves the end of the message out")
    return text[:place] if text.startswith(_BEGUN, place) else text[:place].rstrip()


def _written(template: str, values: dict[str, Any]) -> str:
    """What a template writes, with what it needs beyond the values that transformers has."""
    while True:
        try:
            return rendered_template(template, values)
        except InputError as error:
            more = _needed(str(error), values)
            if not more or all(values.get(name) == value for name, value in more.items()):
                raise
            values = values | more


def _needed(failure: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without which a template has failed."""
    missing = re.search(r"'(\w+)' is undefined", failure)
    name = "" if missing is None else missing[1]
    if name.endswith("_token"):  # the tokenizer has none
        return {name: ""}
    if name == "functions":  # templates of before there were tools
        return {name: json.dumps([tool.get("function", tool) for tool in values["tools"] or ()], indent=4)}
    if name == "datetime":
        return {name: f"{datetime.now():%b %d %Y}"}
    return {"tools": []} if "'NoneType' object is not iterable" in failure else {}


def _by_tokenizer(tokenizer: Any, template: str, messages: Sequence[Mapping[str, Any]], how: Rendering) -> str:
    """By a tokenizer that has a method of its own."""
    ends = {"add_generation_prompt": how.ending == "new", "continue_final_message": how.ending == "begun"}
    given = {**how.options, "tools": how.tools or None, "chat_template": template or None, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template(messages, **given, **ends))
    except Exception as error:  # it may raise anything
        raise InputError(
            f"the chat template fails ({type(error).__name__}: {error}); give another one, or none for plain text"
        ) from None


def _special_tokens(tokenizer: Any) -> Mapping[str, str] | None:
    """Special tokens by name, for templates; None: the tokenizer renders chats in a way of its own."""
    known = getattr(tokenizer, "__dict__", {})
    if "special_tokens_map" in known:  # a recorded tokenizer, as long as transformers' is not read
        return dict(known["special_tokens_map"])
    tokenizer = known.get("_whole") or tokenizer
    method = getattr(type(tokenizer), "apply_chat_template", None)
    if getattr(method, "__module__", "") != "transformers.tokenization_utils_base":
        return None
    return dict(tokenizer.special_tokens_map)


def _of_several(templates: str | Mapping[str, str], *, tools: bool) -> str:
    """The template for a chat, of a text or several by name."""
    if isinstance(templates, str):
        return templates
    if not isinstance(templates, Mapping):
        raise InputError(f"the chat template is {templates!r}, and no text; give another one, or none for plain text")
    name = "tool_use" if tools and "tool_use" in templates else "default"
    if name not in templates:
        raise InputError(
            f"the model has the chat templates {', '.join(templates):.80}, and none is called default; give one of them"
        )
    return templates[name]


def _as_transformers(message: Mapping[str, Any], nulls: bool) -> dict[str, Any]:
    """A message as transformers gives it to a template: thoughts under all of their names."""
    found = {name: value for name, value in message.items() if nulls or value is not None}
    thoughts = next((found[name] for name in _THOUGHTS if found.get(name) is not None), None)
    return found if thoughts is None else {"thinking": thoughts, **found, "reasoning_content": thoughts}


def _marked(content: Any) -> Any:
    """What a message says, with `_BEGUN` behind the last text."""
    if isinstance(content, str):
        return content + _BEGUN
    parts = [dict(part) for part in content]
    for part in reversed(parts):
        if "text" in part:
            part["text"] += _BEGUN
            return parts
    raise InputError("it has no text")
