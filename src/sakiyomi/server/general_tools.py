"""Tools for models whose chat templates know none: told in words, called by one object of JSON.

A grammar keeps forced calls in this form. Earlier calls and their results become texts of the assistant and the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sakiyomi.server.tools import ToolFormat

GENERAL = ToolFormat("general", ())
"""A reply that is a call is one object with a name and arguments."""
_OBJECT = 'one JSON object and nothing else: {"name": NAME, "arguments": {...}}'
_TOLD = """You can call functions. To call one, reply with {call}. Call a function only if it is needed; otherwise \
answer in words. These are the functions:
{functions}"""


def told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, system: bool
) -> list[dict[str, Any]]:
    """Messages without calls and results, which tell of tools in words.

    Args:
        messages: in the form for templates, with arguments as objects.
        tools: OpenAI's descriptions.
        system: see ``described``.
    """
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    found: list[dict[str, Any]] = []
    for message in messages:
        said = dict(message)
        if calls := said.pop("tool_calls", ()):
            said["content"] = "\n".join(filter(None, [said.get("content"), *map(_called, calls)]))
        if said["role"] == "tool":
            name = names.get(said.pop("tool_call_id", ""), said.pop("name", "a function"))
            said = {"role": "user", "content": joined(f"Result of {name}: ", said["content"])}
        if found and found[-1]["role"] == said["role"] == "user":  # templates want users and assistants by turns
            said = {"role": "user", "content": joined(found.pop()["content"], "\n\n", said["content"])}
        found.append(said)
    return described(found, tools, _OBJECT, system=system)


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], call: str, *, system: bool
) -> list[dict[str, Any]]:
    """Messages that tell of tools in words.

    Args:
        messages: in the form for templates.
        tools: OpenAI's descriptions.
        call: what a call is.
        system: the template takes a system message; else the first message of the user tells of the tools.
    """
    found = list(map(dict, messages))
    if not tools:
        return found
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = _TOLD.format(call=call, functions=functions)
    role = "system" if system else "user"
    first = next((number for number, message in enumerate(found) if message["role"] == role), None)
    if first is None:
        return [{"role": role, "content": words}, *found]
    own = found[first]["content"]
    both = joined(own, "\n\n" if own else "", words) if system else joined(words, "\n\n", own)
    found[first] = found[first] | {"content": both}
    return found


def _called(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


def joined(*contents: Any) -> Any:
    """What messages say, as one: a text, or parts where one of them has images."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents)
    return [part for some in parts for part in some]
