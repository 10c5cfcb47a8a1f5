"""Other interfaces to the same texts: OpenAI's responses and Anthropic's messages, by their makers' own clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from openai import BadRequestError, OpenAI

from sakiyomi.scale.front import make_front
from sakiyomi.scale.in_process import Asked, Part
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError
from sakiyomi.server.messages import CountRequest, MessagesRequest, MessagesStyle
from sakiyomi.server.relay import Relay, Sent
from sakiyomi.server.responses import ResponsesRequest
from sakiyomi.server.schema import CompletionRequest
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


@pytest.mark.few(1)
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


def test_a_streamed_message_says_at_its_start_how_long_the_prompt_is(claude: anthropic.Anthropic) -> None:
    """The second time some of it is in the cache."""
    said = [{"role": "user", "content": "The wolf said that it was cold"}]
    for _ in range(2):
        begin, *_, last = claude.messages.create(model="toy", messages=said, stream=True, **(PLAIN | {"max_tokens": 4}))
        used = begin.message.usage
        counted = claude.messages.count_tokens(model="toy", messages=said).input_tokens
        assert used.input_tokens + used.cache_read_input_tokens == counted
    assert used.cache_read_input_tokens > 0 and last.type == "message_stop"


@pytest.mark.few(1)
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
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages have no text"),
        (
            {"system": "a", "messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f",
                                                                       "input": {}}]}]},
            "messages[0].content has a tool_use block",
        ),
    ],
)  # fmt: skip
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
                assert "Result of weather: error: no network" in server.llm.tokenizer.decode(job.prompt)
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


# ---------------------------------------------------------------- replies that have begun

BEGUN = [
    "The cat",
    "The cat ",
    "\n",
    [{"type": "text", "text": "The "}, {"type": "text", "text": "cat"}],
]


def rendered(server: Server, text: str, **how: Any) -> list[int]:
    said = [*SAID, {"role": "assistant", "content": text}]
    return list(server.llm.tokenizer.apply_chat_template(said, **how)["input_ids"])


@pytest.mark.parametrize("begun", BEGUN)
def test_a_begun_reply_is_the_end_of_the_prompt(site: tuple[Server, str], begun: Any) -> None:
    """In each interface, as transformers has it."""
    bodies, text = site[0].bodies, begun if isinstance(begun, str) else "The cat"
    said = [*SAID, {"role": "assistant", "content": begun}]
    expected = rendered(site[0], text, continue_final_message=True)
    message = CountRequest(messages=said).chat(bodies.template)  # type: ignore[arg-type]
    item = {"role": "assistant", "content": text, "status": "incomplete"}
    response = ResponsesRequest(input=[*SAID, item]).chat()  # type: ignore[list-item]
    body = {"messages": said, "continue_final_message": True}
    prompts = [bodies.chat(asked)[0].prompt for asked in (message, response, response.model_validate(body))]
    tokens = web.post(f"{site[1]}/tokenize", json=body).json()["tokens"]
    assert [*prompts, tokens] == [expected] * 4
    counted = web.post(f"{site[1]}/v1/messages/count_tokens", json={"messages": said}).json()
    assert counted == {"input_tokens": len(expected)}
    closed = response.model_validate({"messages": said, "add_generation_prompt": False})
    assert bodies.chat(closed)[0].prompt == rendered(site[0], text)


def test_a_begun_reply_is_continued(site: tuple[Server, str], claude: anthropic.Anthropic, api: OpenAI) -> None:
    said: Any = [*SAID, {"role": "assistant", "content": "The cat"}]
    prompt = rendered(site[0], "The cat", continue_final_message=True)
    expected = api.completions.create(model="toy", prompt=prompt, **GREEDY).choices[0].text
    how = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat_text(api, said, extra_body=how) == expected
    assert claude.messages.create(model="toy", messages=said, **PLAIN).content[0].text == expected
    with claude.messages.stream(model="toy", messages=said, **PLAIN) as stream:
        assert stream.get_final_message().content[0].text == expected


def test_a_response_that_was_cut_goes_on(api: OpenAI) -> None:
    """Its message says that it is incomplete, and is continued where it is sent back as it came."""
    cut = api.responses.create(model="toy", input="The fox said", temperature=0, max_output_tokens=10)
    assert cut.output[0].status == "incomplete"
    with api.responses.stream(model="toy", input="The fox said", temperature=0, max_output_tokens=10) as stream:
        assert [*stream][-1].response.output[0].status == "incomplete"
    rest = api.responses.create(model="toy", input=[*SAID, *cut.output], temperature=0, max_output_tokens=10)
    said = [*SAID, {"role": "assistant", "content": cut.output_text}]
    expected = chat_text(api, said, max_tokens=10, extra_body={"continue_final_message": True})
    assert rest.output_text == expected


@pytest.mark.parametrize("begun", ["", [{"type": "thinking", "thinking": "So"}], [{"type": "text", "text": ""}]])
def test_a_reply_that_has_nothing_in_it_yet_begins(site: tuple[Server, str], begun: Any) -> None:
    body = {"messages": [*SAID, {"role": "assistant", "content": begun}]}
    counts = [
        web.post(f"{site[1]}/v1/messages/count_tokens", json=asked).json() for asked in (body, {"messages": SAID})
    ]
    assert counts[0] == counts[1]


USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "last", "how", "words"),
    [
        ("chat/completions", {"content": "a"}, {"add_generation_prompt": True}, "continue_final_message and"),
        ("chat/completions", {"role": "user", "content": "a"}, {}, "continue_final_message needs a last message"),
        ("chat/completions", {"content": "a", "tool_calls": [CALL]}, {}, "messages[1].tool_calls"),
        (
            "messages",
            {"content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {},
            "messages[1].content",
        ),
    ],
)
def test_what_cannot_be_continued(
    site: tuple[Server, str], path: str, last: dict[str, Any], how: dict[str, Any], words: str
) -> None:
    body = {"messages": [*SAID, {"role": "assistant"} | last], "max_tokens": 4}
    body |= {"continue_final_message": True} | how if path != "messages" else {}
    reply = web.post(f"{site[1]}/v1/{path}", json=body)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("how", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_a_prompt_that_is_no_conversation_has_no_reply_to_continue(site: tuple[Server, str], how: Any) -> None:
    error = web.post(f"{site[1]}/tokenize", json={"prompt": "a"} | how).json()["error"]
    assert error["param"] in how and "is about messages" in error["message"]


def test_a_template_that_leaves_the_message_out_cannot_continue_it() -> None:
    with running(toy_llm("none", template="{{ messages[0].content }}:")) as (_, url):
        body = {"messages": [*SAID, {"role": "assistant", "content": "The cat"}], "continue_final_message": True}
        reply = web.post(f"{url}/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and "cannot continue the last message" in error["message"]
    assert error["param"] == "messages"


def test_a_begun_reply_may_have_begun_to_think() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# </think> #}"
    with running(toy_llm("none", template=template)) as (server, _):
        found = []
        for begun in ("<think>\nSo", "<think>So</think>The cat", "The cat"):
            said = {"messages": [*SAID, {"role": "assistant", "content": begun}], "max_tokens": 4}
            (job,) = server.bodies.chat(MessagesRequest.model_validate(said).chat(template))
            found.append(job.reply.reasoning)
    assert found == [True, None, None]


# ---------------------------------------------------------------- Anthropic's errors


class Cut:
    """Replicas that die after the first event of a stream."""

    dead, busy = (EOFError,), (BlockingIOError,)

    def __init__(self) -> None:
        self.full = False

    async def ask(self, asked: Asked) -> AsyncGenerator[Part]:
        if self.full:
            raise BlockingIOError
        yield Part(200, [(b"content-type", b"text/event-stream")], b"event: ping\ndata: {}\n\n", [Sent(0, (1,), False)])
        raise EOFError

    async def figures(self) -> list[dict[str, Any]]:
        return []


def test_every_error_of_its_paths_is_in_anthropics_form() -> None:
    cut = Cut()
    front = make_front(cut, ServerConfig(api_key="secret", max_body=10_000))
    body = {"messages": SAID, "max_tokens": 4, "stream": True}

    async def ask(path: str, kind: str, said: Any, **how: Any) -> tuple[int, str]:
        transport = httpx.ASGITransport(front)
        headers = {"x-api-key": "secret", "content-type": "application/json"} | how
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            content = said if isinstance(said, bytes) else json.dumps(said).encode()
            reply = await client.request(kind, path, content=content, headers=headers)
        text = reply.text.rpartition("event: error\ndata: ")[2]
        error = json.loads(text)
        assert set(error) == {"type", "error"} and error["type"] == "error"
        assert set(error["error"]) == {"type", "message"}
        return reply.status_code, error["error"]["type"]

    async def ask_all() -> None:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            assert await ask(path, "POST", b"{") == (400, "invalid_request_error")
            assert await ask(path, "POST", {}) == (400, "invalid_request_error")
            assert await ask(path, "POST", body, **{"content-type": "text/plain"}) == (400, "invalid_request_error")
            assert await ask(path, "POST", body, **{"x-api-key": "x"}) == (401, "authentication_error")
            assert await ask(path, "POST", b"a" * 20_000) == (413, "request_too_large")
            assert await ask(path, "GET", b"") == (405, "invalid_request_error")
        assert await ask("/v1/messages/batches", "POST", {}) == (404, "not_found_error")
        assert await ask("/v1/messages", "POST", body) == (200, "api_error")  # the stream had begun
        cut.full = True
        assert await ask("/v1/messages", "POST", body) == (429, "rate_limit_error")

    asyncio.run(ask_all())


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, "permission_error"), (500, "api_error"), (503, "overloaded_error"), (504, "timeout_error")],
)
def test_a_stream_that_fails_ends_with_an_event_that_says_so(status: int, kind: str) -> None:
    style = MessagesStyle("toy", None, CompletionRequest(prompt=""), Relay())  # type: ignore[arg-type]
    data = style.failure(ApiError(status, "why"))
    error = {"type": "error", "error": {"type": kind, "message": "why"}}
    head, _, text = data.decode().partition("\ndata: ")
    assert head == "event: error" and json.loads(text) == error


def test_its_own_client_reads_the_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="this server has 'toy'") as caught:
        claude.messages.create(model="other", messages=SAID, max_tokens=4)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 1000000, and after"):
        claude.messages.create(model="toy", messages=SAID, max_tokens=10**6, stream=True)


HALF = "\ud800"  # of a surrogate pair


@pytest.mark.parametrize(
    ("path", "changed", "param"),
    [
        ("messages", {"stop_sequences": [""]}, "stop_sequences has ''"),
        ("messages", {"max_tokens": 5000}, "max_tokens is 5000"),
        ("messages", {"tools": [{"name": "f", "input_schema": {"type": 3}}]}, "tools[0].input_schema cannot"),
        ("responses", {"max_output_tokens": 5000}, "max_output_tokens is 5000"),
        ("responses", {"input": "x" * 5000}, "input"),
        ("responses", {"instructions": HALF}, "the field 'instructions'"),
        (
            "responses",
            {"tools": [{"type": "function", "name": "f", "description": HALF}]},
            "the field 'tools[0].description'",
        ),
        (
            "messages",
            {"tools": [{"name": "f", "description": HALF, "input_schema": {}}]},
            "the field 'tools[0].description'",
        ),
        ("chat/completions", {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has 'tokenize'"),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "text.format cannot be"),
        ("responses", {"tools": [{"type": "function", "name": "f", "parameters": {"type": 3}}]}, "tools[0].parameters"),
        ("responses", {"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ("chat/completions", {"max_tokens": 5000}, "max_tokens is 5000"),
        ("chat/completions", {"max_completion_tokens": 5000}, "max_completion_tokens is 5000"),
        ("embeddings", {"input": "x" * 5000}, "input"),
    ],
)
def test_errors_name_the_fields_that_were_sent(
    site: tuple[Server, str], path: str, changed: dict[str, Any], param: str
) -> None:
    own = {"messages": {"messages": SAID, "max_tokens": 4}, "chat/completions": {"messages": SAID}}
    body = json.dumps(own.get(path, {"input": "a"}) | changed)
    reply = web.post(f"{site[1]}/v1/{path}", content=body, headers={"content-type": "application/json"})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["message"].startswith(param), reply.text
    assert path == "messages" or error["param"] in param
