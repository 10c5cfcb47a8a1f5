"""Other interfaces to the same texts: OpenAI's responses and Anthropic's messages, by their makers' own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from openai import BadRequestError, OpenAI

from sakiyomi.server.app import Server
from sakiyomi.server.messages import CountRequest
from server_toys import running, toy_llm, web

SAID = [{"role": "user", "content": "The fox said"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
PLAIN: dict[str, Any] = {"extra_body": {"temperature": 0}, "max_tokens": 24}  # the client has no field for it
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def claude(site: tuple[Server, str]) -> Iterator[anthropic.Anthropic]:
    with httpx2.Client(verify=False) as plain:
        yield anthropic.Anthropic(base_url=site[1], api_key="none", max_retries=0, http_client=plain)


def chat_text(api: OpenAI, messages: Any, **values: Any) -> str:
    reply = api.chat.completions.create(model="toy", messages=messages, **(GREEDY | values))
    return reply.choices[0].message.content


# ---------------------------------------------------------------- responses


@pytest.mark.thorough
def test_a_response_is_the_chats_text(api: OpenAI) -> None:
    found = api.responses.create(model="toy", input="The fox said", temperature=0, max_output_tokens=24)
    assert found.output_text == chat_text(api, SAID)
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == 24 and found.usage.total_tokens == 24 + found.usage.input_tokens
    told = api.responses.create(
        model="toy", instructions="Be brief.", input=[*SAID, *found.output, *SAID], temperature=0, max_output_tokens=5
    )
    said = [
        {"role": "system", "content": "Be brief."},
        *SAID,
        {"role": "assistant", "content": found.output_text},
        *SAID,
    ]
    assert told.output_text == chat_text(api, said, max_tokens=5)


def test_a_response_takes_what_chat_completions_take(api: OpenAI, site: tuple[Server, str]) -> None:
    """vLLM's sampling parameters: its own load generators send them here, too."""
    how = {"temperature": 0.8, "seed": 5, "top_k": 40, "min_p": 0.02, "ignore_eos": True, "stop": ["ee"]}
    body = {"input": "The fox said", "max_output_tokens": 24, **how}
    found = web.post(f"{site[1]}/v1/responses", json=body).json()
    said = {"messages": SAID, "max_tokens": 24, **how}
    expected = web.post(f"{site[1]}/v1/chat/completions", json=said).json()["choices"][0]
    assert found["output"][0]["content"][0]["text"] == expected["message"]["content"]


def test_a_streamed_response(api: OpenAI) -> None:
    """The client's own accumulator takes the events for a response."""
    with api.responses.stream(model="toy", input="The fox said", temperature=0, max_output_tokens=24) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    joined = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert joined == events[-1].response.output_text == chat_text(api, SAID)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_a_response(api: OpenAI, stream: bool) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    asked: dict[str, Any] = {
        "model": "toy", "input": "Rome?", "tools": [tool], "temperature": 0,
        "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 200,
    }  # fmt: skip
    if stream:
        with api.responses.stream(**asked) as events:
            kinds = [event.type for event in events]
            found = events.get_final_response()
        assert "response.function_call_arguments.done" in kinds
    else:
        found = api.responses.create(**asked)
    (call,) = found.output
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert found.status == "completed"
    items = [{"role": "user", "content": "Rome?"}, call.to_dict()]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    after = api.responses.create(model="toy", input=items, tools=[tool], tool_choice="none", max_output_tokens=4)
    assert after.output[0].type == "message"


def test_a_response_keeps_to_a_schema(api: OpenAI) -> None:
    wanted = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER}}
    found = api.responses.create(model="toy", input="Rome?", text=wanted, max_output_tokens=100)
    assert json.loads(found.output_text)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 3}]}, "input"),
    ],
)
def test_what_a_response_cannot_have(api: OpenAI, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        api.responses.create(**({"model": "toy", "input": "a", "max_output_tokens": 4} | changed))


# ---------------------------------------------------------------- messages


def test_a_message_is_the_chats_text(claude: anthropic.Anthropic, api: OpenAI) -> None:
    found = claude.messages.create(model="toy", messages=SAID, **PLAIN)
    assert found.content[0].text == chat_text(api, SAID)
    assert found.stop_reason == "max_tokens" and found.usage.output_tokens == 24
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    told = claude.messages.create(model="toy", messages=SAID, system=system, **PLAIN)
    assert told.content[0].text == chat_text(api, [{"role": "system", "content": "Be brief."}, *SAID])
    stop = found.content[0].text[4:7]
    cut = claude.messages.create(model="toy", messages=SAID, stop_sequences=[stop], **PLAIN)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == found.content[0].text[: found.content[0].text.index(stop)]
    counted = claude.messages.count_tokens(model="toy", messages=SAID)
    assert counted.input_tokens == found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)


def test_a_streamed_message(claude: anthropic.Anthropic, api: OpenAI) -> None:
    with claude.messages.stream(model="toy", messages=SAID, **PLAIN) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == chat_text(api, SAID)
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 24


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_a_message(claude: anthropic.Anthropic, stream: bool) -> None:
    tool = {"name": "weather", "description": "Weather of a city.", "input_schema": WEATHER}
    asked: dict[str, Any] = {"model": "toy", "messages": SAID, "max_tokens": 200, "tools": [tool]}
    asked |= {"tool_choice": {"type": "tool", "name": "weather"}, "extra_body": {"temperature": 0}}
    if stream:
        with claude.messages.stream(**asked) as events:
            found = events.get_final_message()
    else:
        found = claude.messages.create(**asked)
    assert found.stop_reason == "tool_use"
    (call,) = found.content
    assert call.name == "weather" and call.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    messages = [*SAID, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    after = claude.messages.create(
        model="toy", messages=messages, tools=[tool], tool_choice={"type": "none"}, max_tokens=4
    )
    assert after.content[0].type == "text"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"model": "other"}, "there is no model"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ],
)
def test_what_a_message_cannot_have(site: tuple[Server, str], changed: dict[str, Any], words: str) -> None:
    reply = web.post(f"{site[1]}/v1/messages", json={"messages": SAID, "max_tokens": 4} | changed)
    assert reply.status_code in (400, 404) and words in reply.text


def test_what_a_template_is_told() -> None:
    """That a tool has failed, and that the model is not to think, where it knows of that."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    thinking = template + "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no network", "is_error": True}
    body = {"messages": [*SAID, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]}
    counts = []
    for given in (template, thinking):
        with running(toy_llm("none", template=given)) as (server, url):
            for more in ({}, {"thinking": {"type": "disabled"}}):
                asked = CountRequest.model_validate(body | more).chat(server.bodies.template)
                (job,) = server.bodies.chat(asked)
                assert "tool: error: no network" in server.llm.tokenizer.decode(job.prompt)
                counted = web.post(f"{url}/v1/messages/count_tokens", json=body | more).json()["input_tokens"]
                assert counted == len(job.prompt)
                counts.append(counted)
    assert counts[0] == counts[1] == counts[3] < counts[2]


def test_both_kinds_of_keys() -> None:
    with running(toy_llm("none"), api_key="secret") as (_, url):
        body = {"messages": SAID, "max_tokens": 1}
        for headers, status in (({}, 401), ({"x-api-key": "wrong"}, 401), ({"x-api-key": "secret"}, 200)):
            assert web.post(f"{url}/v1/messages", json=body, headers=headers).status_code == status
        for path in ("/tokenize", "/detokenize"):
            assert web.post(url + path, json={}).status_code == 401
