"""Replies that keep to a schema, and calls of tools, with reading ahead and without: the same text either way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI

from sakiyomi.server.app import Server
from sakiyomi.server.grammar import Constraint, Grammars
from sakiyomi.server.tools import FORMATS, ToolReader
from server_toys import client, running, toy_llm
from toys import tiny_tokenizer

SAID: list[Any] = [{"role": "user", "content": "Tell me of the fox"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["fox", "river"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def tool(name: str, field: str, values: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {field: values}, "required": [field], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": schema}}


TOOLS: list[Any] = [tool("look", "far", {"type": "boolean"}), tool("go", "to", {"enum": ["sea", "wood"]})]


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Server, str]]:
    with running(toy_llm(max_batch=6)) as found:
        yield found


@pytest.fixture
def api(site: tuple[Server, str]) -> OpenAI:
    return client(site[1])


def chat(api: OpenAI, drafted: bool = True, **values: Any) -> Any:
    ahead = {"gamma": 3} if drafted else {"drafter": "off"}
    return api.chat.completions.create(
        model="toy", messages=SAID, extra_body={"speculation": ahead}, **({"max_tokens": 300, "seed": 4} | values)
    )


# ---------------------------------------------------------------- schemas


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_reply_keeps_to_its_schema(api: OpenAI, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    ahead = chat(api, response_format=form, temperature=temperature)
    alone = chat(api, False, response_format=form, temperature=temperature)
    value = json.loads(ahead.choices[0].message.content)
    assert set(value) == {"name", "age", "kind"} and value["kind"] in ("fox", "river") and 0 <= value["age"] <= 99
    assert ahead.choices[0].finish_reason == "stop"
    assert ahead.choices[0].message.content == alone.choices[0].message.content
    assert ahead.usage.speculation["accepted"] > 0


def test_json_objects_by_both_endpoints(api: OpenAI) -> None:
    """Any object at all; one that the limit cuts off is a beginning of one."""
    for seed in range(3):
        reply = chat(api, response_format={"type": "json_object"}, seed=seed)
        text = reply.choices[0].message.content
        assert text.startswith("{")
        if reply.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
    body = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}}}
    done = api.completions.create(model="toy", prompt="The fox", n=3, seed=1, extra_body=body)
    assert all(choice.text.strip() in ("1", "2") for choice in done.choices)


@pytest.mark.parametrize(
    ("values", "words", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}},
         "Invalid type", "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}},
         "cannot be kept to", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "has a json_schema", "response_format"),
        ({"tool_choice": "required"}, "needs tools", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "'fly'", "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "one of them", "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 3}}}]}, "tools.a", "tools.a"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused(api: OpenAI, values: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        chat(api, **values)
    assert caught.value.param == param


def test_a_constraint_follows_paths_back_and_forth() -> None:
    """Every row allows what a fresh matcher allows behind the same path, whatever was asked for before."""
    tokenizer = tiny_tokenizer()
    grammars = Grammars(tokenizer, 320, [0])

    def fresh() -> Constraint:
        return Constraint(grammars.of_schema(SCHEMA, "x"), 2)

    ids = tokenizer('{"name": "fox", "age": 7, "kind": "fox"}')["input_ids"]
    wrong = tokenizer('{"name": 12')["input_ids"]
    paths = [ids[:n] for n in (0, 5, 3, len(ids), 1)] + [wrong, ids[:4], [*ids, 0], ids]
    one = fresh()
    for path in paths:
        history = torch.tensor([[1, 2, *path]])
        got, expected = one(history, torch.zeros(1, 320)), fresh()(history, torch.zeros(1, 320))
        assert torch.equal(got, expected)
        assert got.isinf().any() == (path != wrong and path[-1:] != [0])  # behind the end nothing counts any more
    assert one(torch.tensor([[1, 2, *ids]]), torch.zeros(1, 330))[0].isfinite().nonzero().tolist() == [[0]]


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
def test_calls_that_must_be(api: OpenAI, choice: Any, stream: bool) -> None:
    how = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "stream": stream}
    if stream:
        events = [event.choices[0] for event in chat(api, **how)]
        calls = [call for event in events for call in event.delta.tool_calls or ()]
        reason = events[-1].finish_reason
        assert not any(event.delta.content for event in events)
    else:
        reply = chat(api, **how).choices[0]
        calls, reason = reply.message.tool_calls, reply.finish_reason
        assert reply.message.content is None
    assert reason == "tool_calls" and len(calls) == 1 and calls[0].id.startswith("call_")
    assert calls[0].function.name == "go" or choice == "required"
    value = json.loads(calls[0].function.arguments)
    assert value in (
        [{"to": "sea"}, {"to": "wood"}] if calls[0].function.name == "go" else [{"far": True}, {"far": False}]
    )


def test_calls_that_may_be(api: OpenAI) -> None:
    """A bias makes the tiny model want one: then it can only be one that is offered."""
    tokenizer = tiny_tokenizer()
    plain = chat(api, tools=TOOLS, max_tokens=12)
    assert plain.choices[0].message.tool_calls is None
    grammars = Grammars(tokenizer, 320, [0])
    from sakiyomi.server.schema import FunctionTool

    offered = [FunctionTool.model_validate(tool) for tool in TOOLS]
    form = FORMATS["<tool_call>"]
    for several, text, whole in (
        (True, 'So <tool_call>\n{"name": "go", "arguments": {"to": "sea"}}\n</tool_call> and ', True),
        (True, 'So <tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>', False),
        (True, 'So <tool_call>\n{"name": "go", "arguments": {"to": "moon"}}\n</tool_call>', False),
        (True, 2 * '<tool_call>\n{"name": "look", "arguments": {"far": true}}\n</tool_call>\n', True),
        (False, 2 * '<tool_call>\n{"name": "look", "arguments": {"far": true}}\n</tool_call>\n', None),
    ):
        matcher = grammars.of_tools(offered, form, forced=False, several=several)
        ids = tokenizer(text)["input_ids"]
        if whole is not None:
            assert (matcher.validate_tokens(ids) == len(ids)) == whole, text


def test_what_was_called_goes_back_into_the_conversation(api: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "go", "arguments": '{"to": "sea"}'}}
    said = [*SAID, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "It is wide."}]  # fmt: skip
    reply = api.chat.completions.create(model="toy", messages=said, tools=TOOLS, tool_choice="none", max_tokens=8)
    longer = api.chat.completions.create(model="toy", messages=said[:1], tools=TOOLS, tool_choice="none", max_tokens=8)
    assert reply.usage.prompt_tokens > longer.usage.prompt_tokens


def test_without_a_place_for_tools_they_are_refused() -> None:
    for template, words in ((None, "without a chat template"), ("{{ messages[0].content }}", "does not know")):
        with (
            running(toy_llm("none", template=template)) as (_, url),
            pytest.raises(openai.BadRequestError, match=words),
        ):
            chat(client(url), tools=TOOLS, tool_choice="none" if template is None else "auto")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_found_however_the_text_is_cut(size: int) -> None:
    call = '<tool_call>\n{"name": "go", "arguments": {"to": "海"}}\n</tool_call>'
    cases = [
        (f"I go. <tool_c {call}\n{call}", "I go. <tool_c ", 2),
        (call, "", 1),
        ("no <tool_call> at all", "no <tool_call> at all", 0),
        ("<tool_call>\n{broken}\n</tool_call> x", "<tool_call>\n{broken}\n</tool_call> x", 0),
        ("a <tool", "a <tool", 0),
    ]
    for text, plain, count in cases:
        reader = ToolReader(FORMATS["<tool_call>"])
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        found = [reader.push(part, part_number == len(parts) - 1) for part_number, part in enumerate(parts)]
        assert "".join(said for said, _ in found) == plain
        calls = [call for _, some in found for call in some]
        assert [call["index"] for call in calls] == list(range(count))
        assert all(json.loads(call["function"]["arguments"]) == {"to": "海"} for call in calls)
