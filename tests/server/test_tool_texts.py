"""Calls whose arguments are no one object of JSON: one by one, as texts, and in messages that have channels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from real_files import real
from sakiyomi.core.outputs import Step
from sakiyomi.server.bodies import BodyReader
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError
from sakiyomi.server.fields import value_of
from sakiyomi.server.grammar import Grammars
from sakiyomi.server.jobs import Event
from sakiyomi.server.replies import Piece, Sample
from sakiyomi.server.schema import ChatRequest, FunctionTool
from sakiyomi.server.thoughts import ChannelReader
from sakiyomi.server.tools import ToolReader
from server_toys import client, marked_tokenizer, running, toy_llm
from tool_templates import MARKS, MODELS, form_of
from toys import tiny_tokenizer

SAID: list[Any] = [{"role": "user", "content": "Tell me of the fox"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": schema}}


GO = tool("go", to={"enum": ["sea", "wood"]})
LOOK = tool("look", far={"type": "boolean"})
TOOLS = [GO, LOOK]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
OFFERED = [FunctionTool.model_validate(each) for each in TOOLS]

# ---------------------------------------------------------------- one by one

SCHEMA = {
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "count": {"type": "integer", "maximum": 9},
        "place": {"$ref": "#/$defs/place"},
        "kind": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "short": {"type": "string", "maxLength": 3, "pattern": "^[a-z]+$"},
    },
    "required": ["code"],
}
WAYS = {
    "Qwen3-Coder": (
        "<tool_call>\n<function=do>\n",
        "<parameter={}>\n{}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "GLM 4.5 to 4.7": ("<tool_call>do\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
}
PROGRAM = 'if a < b:\n    print("<x>")'
RIGHT: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"code": "1"}, {"code": "1"}),
    ({"code": PROGRAM}, {"code": PROGRAM}),
    ({"code": "\n", "count": "7", "place": '{"x": 1}'}, {"code": "\n", "count": 7, "place": {"x": 1}}),
    ({"code": "", "kind": "null", "short": "abc"}, {"code": "", "kind": None, "short": "abc"}),
    ({"code": "a", "kind": "5"}, {"code": "a", "kind": "5"}),
]
WRONG: list[dict[str, str]] = [
    {},
    {"code": "a", "count": "x"},
    {"code": "a", "count": "10"},
    {"code": "a", "place": "{}"},
    {"count": "1", "code": "a"},
    {"code": "a", "more": "1"},
    {"code": "a", "short": "abcd"},
    {"code": "a", "short": "A"},
]


def written(models: str, pairs: dict[str, str]) -> str:
    begin, each, end = WAYS[models]
    return begin + "".join(each.format(*pair) for pair in pairs.items()) + end


@pytest.mark.parametrize("models", WAYS)
@pytest.mark.parametrize("tokens", [False, True])
def test_values_keep_to_the_schema(models: str, tokens: bool) -> None:
    """Texts are any text; numbers, objects and null are JSON where they are allowed."""
    form = form_of(models)
    offered = [FunctionTool.model_validate({"type": "function", "function": {"name": "do", "parameters": SCHEMA}})]
    tokenizer = marked_tokenizer(form.marks if tokens else [])
    matcher = Grammars(tokenizer, 320, [0]).of_tools(offered, form, forced=True, several=True)
    for pairs in [*(pairs for pairs, _ in RIGHT), *WRONG]:
        ids = tokenizer(written(models, pairs))["input_ids"]
        assert (matcher.validate_tokens([*ids, 0]) == len(ids) + 1) == (pairs not in WRONG), pairs


@pytest.mark.parametrize("models", WAYS)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_values_are_what_the_schema_says(models: str, size: int) -> None:
    for pairs, value in RIGHT:
        text, reader = written(models, pairs), ToolReader(form_of(models), schemas={"do": SCHEMA})
        parts = [reader.push(text[i : i + size], False) for i in range(0, len(text), size)] + [reader.push("", True)]
        (call,) = [call for _, calls in parts for call in calls]
        assert json.loads(call["function"]["arguments"]) == value and call["function"]["name"] == "do"
        assert not "".join(words for words, _ in parts)


def test_any_argument_where_the_schema_names_none() -> None:
    offered = [FunctionTool.model_validate({"type": "function", "function": {"name": "do"}})]
    for models in WAYS:
        tokenizer = tiny_tokenizer()
        matcher = Grammars(tokenizer, 320, [0]).of_tools(offered, form_of(models), forced=True, several=False)
        for pairs in ({}, {"a": "1"}, {"a": "1", "b": "x\ny"}):
            ids = tokenizer(written(models, pairs))["input_ids"]
            assert matcher.validate_tokens([*ids, 0]) == len(ids) + 1
        (call,) = ToolReader(form_of(models), schemas={"do": {}}).push(written(models, {"a": "1", "b": "x"}), True)[1]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "x"}


def test_what_cannot_be_kept_to_in_texts_is_refused() -> None:
    for parameters, words in (
        (
            tool("do", it={"type": "string", "format": "date"})["function"]["parameters"],
            "texts as they are, without format",
        ),
        ({"anyOf": [{"type": "object"}]}, "parameters are no plain object"),
        (tool("do", it={"enum": ["a</parameter>"]})["function"]["parameters"], "ends texts with </parameter>, which"),
        (tool("do", **{"a>": {"type": "null"}})["function"]["parameters"], "ends names with >, which is in 'a>'"),
    ):
        one = FunctionTool.model_validate({"type": "function", "function": {"name": "do", "parameters": parameters}})
        with pytest.raises(ApiError, match=words):
            Grammars(tiny_tokenizer(), 320, [0]).of_tools([one], form_of("Qwen3-Coder"), forced=True, several=True)


# ---------------------------------------------------------------- channels

THOUGHT = "<|channel|>analysis<|message|>It is wide.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.go <|constrain|>json<|message|>{"to": "sea"}'
REPLIES = [  # written, thoughts, reply, calls
    (f"{THOUGHT}<|channel|>final<|message|>Go <b> on.", "It is wide.", "Go <b> on.", 0),
    ("<|channel|>final<|message|>Go.<|return|>", "", "Go.", 0),
    (f"{THOUGHT}{CALL}<|call|>", "It is wide.", "", 1),
    (' to=functions.go<|channel|>commentary json<|message|>{"to": "sea"}', "", "", 1),
    (f"<|channel|>commentary<|message|>I go.<|end|><|start|>assistant{CALL}", "", "I go.", 1),
    (
        "<|channel|>commentary<|message|>I go.<|end|><|start|>assistant<|channel|>final<|message|>Gone.",
        "",
        "I go.\n\nGone.",
        0,
    ),
]
OTHERS = [
    ("So it goes.", "", "So it goes.", 0),  # of a model that has no channels
    (CALL[:-3], "", '{"to": "se', 0),  # cut off by its length: text
    (CALL.replace(".go", ".fly"), "", "", 0),  # was not offered
    ("<|channel|>analysis<|message|>It is", "It is", "", 0),
    ("", "", "", 0),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_in_channels_are_told_apart(size: int) -> None:
    for text, thoughts, reply, count in [*REPLIES, *OTHERS]:
        reader = ChannelReader(form_of("gpt-oss"), schemas=SCHEMAS)
        parts = [reader.push(text[i : i + size], False) for i in range(0, len(text), size)] + [reader.push("", True)]
        assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (thoughts, reply)
        calls = [call for part in parts for call in part[2]]
        assert [call["function"] for call in calls] == [{"name": "go", "arguments": '{"to": "sea"}'}] * count


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_follows_a_reply_that_has_begun_is_text(size: int) -> None:
    """The head of its message is in the prompt; and an object is a call only where a reply begins with it."""
    text = 'to= assistant {"name": "go"}<|return|>'
    reader = ChannelReader(form_of("gpt-oss"), schemas=SCHEMAS, begun=True)
    parts = [reader.push(text[i : i + size], False) for i in range(0, len(text), size)] + [reader.push("", True)]
    assert "".join(part[1] for part in parts) == text.removesuffix("<|return|>")
    call = '{"name": "go", "parameters": {"to": "sea"}}'
    for begun in (False, True):
        calls = ToolReader(form_of("Llama 3 and 4"), schemas=SCHEMAS, begun=begun)
        found = [calls.push(call[i : i + size], False) for i in range(0, len(call), size)] + [calls.push("", True)]
        assert "".join(part[0] for part in found) == (call if begun else "") and len(calls.calls) == (not begun)


def test_a_begun_reply_in_channels_has_no_calls() -> None:
    with running(toy_llm("none", template=TEMPLATE, marks=MARKS)) as (server, _):
        body = {"messages": [*SAID, {"role": "assistant", "content": "It"}], "continue_final_message": True}
        (job,) = server.bodies.chat(ChatRequest.model_validate(body))
        assert job.reply.begun and job.reply.tools is not None and job.reply.tools.channels
        with pytest.raises(ApiError, match="continue_final_message cannot be combined"):
            server.bodies.chat(ChatRequest.model_validate(body | {"tools": TOOLS}))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_arguments_may_have_the_text_of_a_mark(size: int) -> None:
    said = "<|end|> and <|start|>"
    text = CALL.replace("sea", said)
    for behind in ("", "<|call|>", "<|end|><|start|>assistant<|channel|>final<|message|>Done."):
        reader, written = ChannelReader(form_of("gpt-oss"), schemas=SCHEMAS), text + behind
        parts = [reader.push(written[i : i + size], False) for i in range(0, len(written), size)]
        parts.append(reader.push("", True))
        assert [json.loads(call["function"]["arguments"]) for part in parts for call in part[2]] == [{"to": said}]
        assert "".join(part[1] for part in parts) == "Done." * ("Done." in behind)


@pytest.mark.parametrize("models", [*(models for models in MODELS if models not in WAYS), "gpt-oss", "Granite 3"])
def test_arguments_that_are_nested_too_deeply_are_text(models: str) -> None:
    form, deep = form_of(models), '{"to": ' + "[" * 20000
    before = CALL[: CALL.index("{")] if form.channels else form.opening + form.around("go")[0]
    reader = ChannelReader(form_of("gpt-oss"), schemas=SCHEMAS) if form.channels else ToolReader(form, schemas=SCHEMAS)
    (*_, said, _), (*_, rest, calls) = reader.push(before + deep, False), reader.push("", True)
    assert (said + rest).endswith(deep) and not calls


def test_an_argument_that_is_nested_too_deeply_is_a_text() -> None:
    assert value_of(deep := "[" * 20000, {}, "a") == deep


def test_the_grammar_of_channels() -> None:
    tokenizer, form = marked_tokenizer(MARKS), form_of("gpt-oss")
    end = tokenizer.convert_tokens_to_ids("<|return|>")
    grammars = Grammars(tokenizer, 320, [end])

    def takes(matcher: Any, text: str) -> bool:
        ids = tokenizer(text.removesuffix("<|return|>"))["input_ids"]
        return bool(matcher.validate_tokens([*ids, end]) == len(ids) + 1)

    free, forced = (grammars.of_tools(OFFERED, form, forced=must, several=True) for must in (False, True))
    for text, _, _, calls in REPLIES:
        assert takes(free, text) and takes(forced, text) == bool(calls)
        assert not takes(free, text.replace("functions.go", "functions.fly").replace("Go", "<|start|>"))
    schema = grammars.of_reply({"enum": [1, 2]}, form, "response_format")
    assert takes(schema, f"{THOUGHT}<|channel|>final<|message|>2") and not takes(schema, "2")
    with pytest.raises(ApiError, match="the tokenizer has no token"):
        Grammars(tiny_tokenizer(), 320, [0]).of_tools(OFFERED, form, forced=True, several=True)


TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ m.thinking }}{% for c in m.tool_calls %}"
    "to=functions.{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}<|start|>assistant{# <|channel|> #}"
)


@pytest.mark.thorough
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_reads_channels(stream: bool) -> None:
    """What a tiny model writes by the grammar; what it has thought and called goes back into the conversation."""
    with running(toy_llm(template=TEMPLATE, marks=MARKS, max_batch=2)) as (_, url):
        api = client(url)

        def asked(**how: Any) -> tuple[str, str, list[Any], str]:
            how = {"messages": SAID, "max_tokens": 300, "temperature": 0} | how
            if not stream:
                (choice,) = api.chat.completions.create(model="toy", **how).choices
                said, reason = choice.message, choice.finish_reason
                calls = said.tool_calls or []
                thoughts, text = getattr(said, "reasoning_content", ""), said.content or ""
            else:
                events = [each.choices[0] for each in api.chat.completions.create(model="toy", stream=True, **how)]
                calls = [call for event in events for call in event.delta.tool_calls or ()]
                thoughts = "".join(getattr(event.delta, "reasoning_content", "") for event in events)
                text, reason = "".join(event.delta.content or "" for event in events), events[-1].finish_reason
            return thoughts, text, [call.function for call in calls], reason

        # Thoughts of a tiny model have no end: it is kept from the tokens that begin them.
        vocabulary = marked_tokenizer(MARKS).get_vocab()
        bias = {str(i): -100 for token, i in vocabulary.items() if token.startswith("a") or token == "<|message|>"}
        named = {"type": "function", "function": {"name": "go"}}
        thoughts, text, calls, reason = asked(tools=TOOLS, tool_choice=named, logit_bias=bias)
        assert [call.name for call in calls] == ["go"] and (thoughts, text, reason) == ("", "", "tool_calls")
        assert json.loads(calls[0].arguments)["to"] in ("sea", "wood")
        thoughts, text, calls, _ = asked(max_tokens=40)
        assert not calls and "<|" not in text + thoughts
        call = {"id": "x", "type": "function", "function": {"name": "go", "arguments": '{"to": "sea"}'}}
        said = [*SAID, {"role": "assistant", "reasoning_content": "Wide.", "content": None, "tool_calls": [call]}]
        assert asked(messages=[*said, {"role": "tool", "tool_call_id": "x", "content": "Done."}], max_tokens=4)[3]


# ---------------------------------------------------------------- templates of real models

HEADED = {
    "Kimi-K3": (
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        "Wide.<|close|>think<|sep|><|open|>response<|sep|>I go.<|close|>response<|sep|><|open|>tools<|sep|>",
        '<|open|>call tool="go" index="1"<|sep|><|open|>argument key="to" type="string"<|sep|>sea<|close|>argument'
        "<|sep|><|close|>call<|sep|>",
        '<|open|>call tool="look" index="2"<|sep|><|open|>argument key="far" type="boolean"<|sep|>true<|close|>argument'
        "<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
    ),
    "muse-glimmer": (
        MARKS,
        " to=self<|message|>Wide.<|eom|><|start|>assistant to=user<|message|>I go.<|eom|><|start|>assistant",
        ' to=go<|message|><atem:function_calls>\n<atem:invoke name="go">\n<atem:parameter name="to">sea'
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
        '<|eom|><|start|>assistant to=look<|message|><atem:function_calls>\n<atem:invoke name="look">\n'
        '<atem:parameter name="far">true</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
}
"""Special tokens of the model; thoughts and a text, a call, and another one."""


@pytest.mark.parametrize("template", HEADED)
def test_replies_whose_parts_have_heads(template: str) -> None:
    """The grammar takes them, and they are read."""
    marks, before, go, look = HEADED[template]
    path = real(f"llama.cpp/models/templates/{template}.jinja")
    llm = toy_llm("none", template=path.read_text(encoding="utf-8"), marks=marks)
    reader = BodyReader(llm, ServerConfig(served_name="toy"))
    (job,) = reader.chat(ChatRequest.model_validate({"messages": SAID, "tools": TOOLS}))
    (constraint,) = job.params.logits_processors
    text = before + go + look
    for old, new in (("", ""), ("sea", "moon"), ("go", "fly")):
        assert constraint._follow(llm.tokenizer(text.replace(old, new))["input_ids"]) == (old == new)
    for size in (1, 3, 7, 1000):
        sample = Sample(job, None, llm.tokenizer, lambda count: "0" * 2 * count)  # type: ignore[arg-type]
        ids, whole = llm.tokenizer(text)["input_ids"], Piece(0)
        for i in range(0, len(ids), size):
            part = ids[i : i + size]
            step = Step(llm.tokenizer.decode(part), tuple(part), finish_reason="stop" if i + size >= len(ids) else None)
            whole.add(sample.read(Event(job, step)))
        calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in whole.calls]
        assert (whole.thoughts, whole.text) == ("Wide.", "I go.")
        assert calls == [("go", {"to": "sea"}), ("look", {"far": True})] and whole.finish_reason == "tool_calls"


@pytest.mark.thorough
@pytest.mark.parametrize("template", HEADED)
def test_forced_calls_whose_parts_have_heads(template: str) -> None:
    marks, *_ = HEADED[template]
    path = real(f"llama.cpp/models/templates/{template}.jinja")
    with running(toy_llm(template=path.read_text(encoding="utf-8"), marks=marks, max_batch=2)) as (_, url):
        api, vocabulary = client(url), marked_tokenizer(marks).get_vocab()
        bias = {str(i): -100 for token, i in vocabulary.items() if token[:1] in ("s", "u")}  # no thoughts, no text
        assert next(iter(api.models.list())).to_dict()["tools"] == ("learnt" if template == "Kimi-K3" else template)
        for choice in ("required", {"type": "function", "function": {"name": "look"}}):
            how: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
            how |= {"messages": SAID, "max_tokens": 400, "logit_bias": bias}
            (reply,) = api.chat.completions.create(model="toy", **how).choices
            (call,) = reply.message.tool_calls or []
            name, values = call.function.name, json.loads(call.function.arguments)
            assert reply.finish_reason == "tool_calls" and reply.message.content is None
            assert values in ([{"far": False}, {"far": True}] if name == "look" else [{"to": "sea"}, {"to": "wood"}])
            assert choice == "required" or name == "look"
            events = [each.choices[0] for each in api.chat.completions.create(model="toy", stream=True, **how)]
            (other,) = [call for event in events for call in event.delta.tool_calls or ()]
            assert other.function is not None
            assert (other.function.name, json.loads(other.function.arguments or "")) == (name, values)
