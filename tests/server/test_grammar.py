"""Replies that keep to a schema, and calls of tools, with reading ahead and without: the same text either way."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer

from sakiyomi import LLM, SamplingParams
from sakiyomi.core.text import TextStream
from sakiyomi.model_executor.loading.recorded_tokenizer import KNOWN, RecordedTokenizer
from sakiyomi.server.bodies import BodyReader
from sakiyomi.server.channels import single
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError
from sakiyomi.server.grammar import Constraint, Grammars
from sakiyomi.server.schema import ChatRequest, FunctionTool
from sakiyomi.server.tools import FORMATS, ToolFormat, ToolReader, listed_format, shown
from server_toys import client, marked_tokenizer, running, toy_llm, web
from tool_templates import form_of
from toys import character_tokenizer, tiny_llama, tiny_tokenizer

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


def chat(api: OpenAI, drafted: bool = True, **values: Any) -> Any:
    ahead = {"gamma": 3} if drafted else {"drafter": "off"}
    return api.chat.completions.create(
        model="toy", extra_body={"speculation": ahead}, **({"messages": SAID, "max_tokens": 300, "seed": 4} | values)
    )


# ---------------------------------------------------------------- schemas


def test_tokenizers_of_recorded_models_are_taken_and_those_without_a_backend_are_not() -> None:
    whole = tiny_tokenizer()
    known = {name: getattr(whole, name) for name in KNOWN}
    recorded = RecordedTokenizer(Tokenizer.from_str(whole.backend_tokenizer.to_str()), known, lambda: None)
    for tokenizer in (whole, recorded):
        matcher = Grammars(tokenizer, len(whole), []).of_schema(SCHEMA, "response_format")
        text = '{"name": "fox", "age": 7, "kind": "fox"}'
        assert matcher.try_consume_tokens(ids := whole(text, add_special_tokens=False)["input_ids"]) == len(ids)
    with pytest.raises(ApiError, match="does not support grammars"):
        Grammars(character_tokenizer(), 300, []).of_schema(SCHEMA, "response_format")


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "foo"}, "Invalid type: foo"),
    ({"not": {}}, 'Unimplemented keys: ["not"]'),
    ({"pattern": "(?=a)"}, "regex parse error: (?=a) ^^^ error: look-around, including look-ahead and look-behind, is "
                           "not supported"),
])  # fmt: skip
def test_a_schema_that_cannot_be_kept_to_is_refused_without_our_own_rules(schema: Any, words: str) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ApiError) as caught:
        Grammars(tokenizer, len(tokenizer), []).of_schema(schema, "response_format")
    assert caught.value.message == f"response_format cannot be enforced: {words}"


@pytest.mark.few(1)
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
         "cannot be enforced", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "has a json_schema", "response_format"),
        ({"tool_choice": "required"}, "needs tools", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "'fly'", "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "one of them", "response_format"),
        ({"tools": [*TOOLS, {"type": "function", "function": {"name": "a", "parameters": {"type": 3}}}]},
         f"tools.{len(TOOLS)}..function.parameters cannot", f"tools[{len(TOOLS)}].function.parameters"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused(api: OpenAI, values: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        chat(api, **values)
    assert caught.value.param == param


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_what_a_grammar_forces_is_drafted(temperature: float) -> None:
    """The text stays the same, greedy and with a rule that draws the same numbers, in fewer passes."""
    tokenizer = tiny_tokenizer()
    llm = LLM((tiny_llama(vocab_size=320), tokenizer), "none", compile=False, strict=True)
    grammars = Grammars(tokenizer, 320, [0])
    schema = {"type": "object", "properties": {"a_long_name": {"enum": ["first choice", "second choice"]}}}
    schema |= {"required": ["a_long_name"], "additionalProperties": False}
    prompt = tokenizer("The fox")["input_ids"]
    found = []
    for forces in (True, False):
        constraint = Constraint(grammars.of_schema(schema, "x"), len(prompt), tokenizer)
        if not forces:
            constraint.forced = lambda history: ()  # type: ignore[method-assign]
        params = SamplingParams(
            max_new_tokens=96, temperature=temperature, seed=3, acceptance="coupled" if temperature else "auto",
            logits_processors=[constraint],
        )  # fmt: skip
        found.append(llm.generate([prompt], params)[0])
    assert json.loads(found[0].text)["a_long_name"].endswith("choice")
    assert found[0].token_ids == found[1].token_ids
    assert found[1].stats.rounds == len(found[1].token_ids) - 1 > found[0].stats.rounds


def test_a_constraint_follows_paths_back_and_forth() -> None:
    """Every row allows what a fresh matcher allows behind the same path, whatever was asked for before."""
    tokenizer = tiny_tokenizer()
    grammars = Grammars(tokenizer, 320, [0])

    def fresh() -> Constraint:
        return Constraint(grammars.of_schema(SCHEMA, "x"), 2, tokenizer)

    ids = tokenizer('{"name": "fox", "age": 7, "kind": "fox"}')["input_ids"]
    wrong = tokenizer('{"name": 12')["input_ids"]
    paths = [ids[:n] for n in (0, 5, 3, len(ids), 1)] + [wrong, ids[:4], [*ids, 0], ids]
    one = fresh()

    def changed(constraint: Constraint, text: list[int], path: list[int], width: int = 320) -> torch.Tensor:
        scores = torch.zeros(width)
        constraint.change([1, 2, *text], path, scores.numpy())
        return scores

    for path in paths:
        got, expected = changed(one, [], path), changed(fresh(), path, [])
        assert torch.equal(got, expected)
        assert got.isinf().any() == (path != wrong and path[-1:] != [0])  # behind the end nothing counts any more
    assert changed(one, ids[:3], ids[3:], 330).isfinite().nonzero().tolist() == [[0]]


SIGNS = ["a <|end|> b", "é/\U0001f600"]
"""The text of a token that ends texts, and characters that may be spelled as escapes."""


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("path", ["chat", "completions", "responses"])
def test_values_are_the_text_that_the_schema_has(api: OpenAI, path: str, temperature: float) -> None:
    """However it is spelled: a backslash is what this model likes best."""
    bias = {str(tiny_tokenizer().convert_tokens_to_ids("\\")): 60}
    for want in SIGNS:
        schema = {"type": "object", "properties": {want: {"const": want}}, "required": [want],
                  "additionalProperties": False}  # fmt: skip
        form = {"name": "x", "schema": schema}
        how = {"temperature": temperature, "extra_body": {"logit_bias": bias, "seed": 3}}
        wanted = {"response_format": {"type": "json_schema", "json_schema": form}}
        if path == "responses":
            del how["extra_body"]  # its requests have no biases
            text = api.responses.create(
                model="toy", input="the fox", text={"format": {"type": "json_schema", **form}}, **how
            ).output_text
        elif path == "chat":
            reply = api.chat.completions.create(model="toy", messages=SAID, **wanted, **how).choices[0]
            text = reply.message.content
            assert reply.finish_reason == "stop"
        else:
            how["extra_body"] |= wanted
            text = api.completions.create(model="toy", prompt="the fox", max_tokens=200, **how).choices[0].text
        assert json.loads(text) == {want: want}
        assert path == "responses" or "\\u" in text.lower()


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("path", ["chat", "messages"])
def test_arguments_are_the_text_that_the_schema_has(api: OpenAI, path: str) -> None:
    for want in SIGNS:
        asked = tool("go", want, {"enum": [want]})
        if path == "chat":
            (call,) = (
                chat(api, tools=[asked], tool_choice="required", parallel_tool_calls=False)
                .choices[0]
                .message.tool_calls
            )
            assert json.loads(call.function.arguments) == {want: want}
            continue
        own = {"name": "go", "input_schema": asked["function"]["parameters"]}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        body = {"model": "toy", "max_tokens": 300, "messages": SAID, "tools": [own], "tool_choice": choice}
        reply = web.post(f"{api.base_url}messages", json=body).json()
        assert [part["input"] for part in reply["content"]] == [{want: want}], reply


@pytest.mark.parametrize("models", ["Qwen3-Coder", "GLM 4.5 to 4.7"])
def test_names_of_arguments_are_their_text(models: str) -> None:
    """Those that are written one by one, too: a mark that is a token of its own is one where a mark stands alone."""
    form = form_of(models)
    tokenizer = marked_tokenizer([*marks_of(form), "[NO]"])
    offered = [FunctionTool.model_validate(tool("go", "a[NO]b", {"enum": ["[NO]"]}))]
    matcher = Grammars(tokenizer, 320, [0]).of_tools(offered, form, forced=True, several=False)
    one = WRITTEN[models][0].replace("sea", "@").replace(">to<", ">%<").replace("=to>", "=%>")
    spelled = [tokenizer(letter)["input_ids"] for letter in ("a", *"[NO]", "b")]
    parts = {"@": [*itertools.chain(*spelled[1:-1])], "%": [*itertools.chain(*spelled)]}
    ids = [i for part in re.split("([@%])", one) for i in parts.get(part) or tokenizer(part)["input_ids"]]
    assert matcher.validate_tokens([*ids, 0]) == len(ids) + 1
    wrong = tokenizer(one.replace("@", "[NO]").replace("%", "a[NO]b"))["input_ids"]  # the token
    assert matcher.validate_tokens([*wrong, 0]) < len(wrong)


@pytest.mark.few(1)
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
    assert reason == "tool_calls" and len(calls) == 1 and re.fullmatch("[0-9a-z]{9}", calls[0].id)
    assert calls[0].function.name == "go" or choice == "required"
    value = json.loads(calls[0].function.arguments)
    assert value in (
        [{"to": "sea"}, {"to": "wood"}] if calls[0].function.name == "go" else [{"far": True}, {"far": False}]
    )


def test_calls_that_may_be(api: OpenAI) -> None:
    """A tiny model wants none; the grammar of one that does is looked at below."""
    assert chat(api, tools=TOOLS, max_tokens=12).choices[0].message.tool_calls is None


# How a model of each kind writes one call and two. Llama's template says that there is one call a reply.
GO, LOOK = '{"name": "go", "arguments": {"to": "sea"}}', '{"name": "look", "arguments": {"far": true}}'
LLAMA = GO.replace("arguments", "parameters")


def section(
    begin: str, end: str, call: str, values: Sequence[str] = ('{"to": "sea"}', '{"far": true}')
) -> tuple[str, str]:
    """One call and two between marks of their own."""
    one, two = map(call.format, ("go", "look"), values)
    return begin + one + end, begin + one + two + end


WRITTEN = {
    "Mistral since 2025": (go := '[TOOL_CALLS]go[ARGS]{"to": "sea"}', go + '[TOOL_CALLS]look[ARGS]{"far": true}'),
    "Mistral": (f"[TOOL_CALLS] [{GO}]", f"[TOOL_CALLS][{GO}, {LOOK}]"),
    "Llama 3 and 4": (LLAMA, LLAMA),
    "Granite 3": (f"<|tool_call|>[{GO}]", f"<|tool_call|>[{GO}, {LOOK}]"),
    "Phi 4 mini": (go := f"<|tool_call|>{GO}<|/tool_call|>", go + f"<|tool_call|>{LOOK}<|/tool_call|>"),
    "Phi 4 mini by vLLM's template": (f"functools[{GO}]", f"functools[{GO}, {LOOK}]"),
    "Nemotron": (f"<TOOLCALL>[{GO}]</TOOLCALL>", f"<TOOLCALL>[{GO}, {LOOK}]</TOOLCALL>"),
    "DeepSeek V3, R1": section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"),
    "DeepSeek V3.1": section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    "Kimi K2": section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.{}:3<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    "Qwen3-Coder": (go := "<tool_call>\n<function=go>\n<parameter=to>\nsea\n</parameter>\n</function>\n</tool_call>",
        go + "\n<tool_call>\n<function=look>\n<parameter=far>\ntrue\n</parameter>\n</function>\n</tool_call>"),
    "GLM 4.5 to 4.7": (go := "<tool_call>go\n<arg_key>to</arg_key>\n<arg_value>sea</arg_value>\n</tool_call>",
        go + "\n<tool_call>look<arg_key>far</arg_key><arg_value>true</arg_value></tool_call>"),
    "Kimi K3": section("<|open|>tools<|sep|>", "<|close|>tools<|sep|>",
        '<|open|>call tool="{}" index="3"<|sep|><|open|>argument {}<|close|>argument<|sep|><|close|>call<|sep|>',
        ('key="to" type="string"<|sep|>sea', 'key="far" type="boolean"<|sep|>true')),
    "Hermes, Qwen": (go := f"<tool_call>\n{GO}\n</tool_call>", go + f"\n<tool_call>\n{LOOK}\n</tool_call>"),
    "LFM2": ("<|tool_call_start|>[go(to='sea')]<|tool_call_end|>",
             "<|tool_call_start|>[go(to='sea'), look(far=True)]<|tool_call_end|>"),
}  # fmt: skip
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def marks_of(form: ToolFormat) -> list[str]:
    return [mark for mark in form.marks if "```" not in mark and len(single(mark)) < 2]


LISTED = {
    "gpt-oss": "<|channel|> <|message|> to=functions.",
    "muse-glimmer": "<|message|> <|eom|> <atem:invoke",
    "Granite 3": "<|tool_call|> followed by a JSON list",
    "LFM2": "List of tools: [",
}
"""Words of the templates of which nothing can be learnt."""


def test_every_listed_format_is_known_by_its_template() -> None:
    assert [form.models for form in FORMATS] == list(LISTED)
    for models, template in LISTED.items():
        assert (form := listed_format(template)) is not None and form.models == models
    assert listed_format("<|channel|>") is None  # half of a way


@pytest.mark.few(2)
@pytest.mark.parametrize("tokens", ["letters", "added", "special"])
@pytest.mark.parametrize("models", WRITTEN)
def test_calls_are_written_and_found(models: str, tokens: str) -> None:
    """By the grammar, and by the reader, whether marks are tokens of their own or not, and however the text is cut."""
    form, (one, text) = form_of(models), WRITTEN[models]
    tokenizer = marked_tokenizer([*marks_of(form), "<think>"] if tokens != "letters" else [], tokens == "special")
    grammars = Grammars(tokenizer, 320, [0])
    offered = [FunctionTool.model_validate(tool) for tool in TOOLS]
    ahead = "" if not form.opening else "<think>" if tokens != "letters" else "So "
    lead = form.lead if tokens != "letters" else ""

    def takes(said: str, **how: bool) -> bool:
        matcher = grammars.of_tools(offered, form, **({"forced": False, "several": True} | how))
        ids = tokenizer(said)["input_ids"]
        return bool(matcher.validate_tokens([*ids, 0]) == len(ids) + 1)

    for how in ({}, {"forced": True}):
        assert takes(text, **how) and takes(lead + text, **how)
        assert not takes(text.replace("go", "fly"), **how) and not takes(text.replace("sea", "moon"), **how)
    assert takes(ahead + text) and takes("So it goes.") and takes("{}") and takes("")
    assert not takes(ahead + "x" + text, forced=True) and not takes("So it goes.", forced=True)
    assert takes(one, several=False) and takes(one, several=False, forced=True)
    bare = text[text.index(form.bare) :] if form.bare else text
    if form.bare:  # the opening is left out
        assert takes(ahead + bare) and not takes(ahead + bare.replace("go", "fly"))
        assert not takes(bare.replace("sea", "moon")) and not takes(bare, forced=True)
    assert one == text or not takes(text, several=False, forced=True)

    for said, plain in (
        (ahead + lead + text, ahead), ("So it goes.", "So it goes."), (ahead + text[:-1], None), (ahead + bare, ahead)
    ):  # fmt: skip
        for size in (1, 3, 1000):
            stream, reader = TextStream(tokenizer, (), shown(form.marks, tokenizer)), ToolReader(form, schemas=SCHEMAS)
            ids = tokenizer(said)["input_ids"]
            parts = [stream.push(ids[i : i + size])[0] for i in range(0, len(ids), size)]
            found = [reader.push(part, False) for part in parts] + [reader.push(stream.finish(), True)]
            calls = [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for _, some in found
                for call in some
            ]
            given = "".join(words for words, _ in found)
            if plain is None:  # cut off by its length: what is not whole is text
                assert len(calls) < 1 + ("far" in text)
                continue
            assert given == (plain if tokens != "special" else plain.replace("<think>", ""))
            assert calls == (
                [] if said == plain else [("go", {"to": "sea"}), ("look", {"far": True})][: 1 + ("far" in text)]
            )


def test_what_was_called_goes_back_into_the_conversation(api: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "go", "arguments": '{"to": "sea"}'}}
    said = [*SAID, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "It is wide."}]  # fmt: skip
    reply = api.chat.completions.create(model="toy", messages=said, tools=TOOLS, tool_choice="none", max_tokens=8)
    longer = api.chat.completions.create(model="toy", messages=said[:1], tools=TOOLS, tool_choice="none", max_tokens=8)
    assert reply.usage.prompt_tokens > longer.usage.prompt_tokens


def test_without_a_place_for_tools_they_are_refused() -> None:
    for template, choice, words in (
        (None, "none", "no chat template"),
        (None, "auto", "no chat template"),
    ):
        reader = BodyReader(toy_llm("none", template=template), ServerConfig(served_name="toy"))
        asked = {"model": "toy", "messages": SAID, "tools": TOOLS, "tool_choice": choice}
        with pytest.raises(ApiError, match=words):
            reader.chat(ChatRequest.model_validate(asked))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("models", "call"),
    [("Mistral", "{{ '[TOOL_CALLS] [' if loop.first }}{{ f | tojson }}{{ ']' if loop.last else ', ' }}"),
     ("Mistral since 2025", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
     ("Llama 3 and 4", '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}')],
)  # fmt: skip
def test_a_client_calls_with_models_whose_marks_are_special_tokens(models: str, call: str) -> None:
    """What is called goes back into the conversation by the ids that were given; the template takes no others."""
    template = (
        "{{ tools | tojson if tools }}{% for message in messages %}{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}{% set f = call.function %}"
        + call
        + "{{ raise_exception('nine letters!') if call.id | length != 9 }}{% endfor %}{% endfor %}"
    )
    with running(toy_llm(template=template, marks=marks_of(form_of(models)), max_batch=2)) as (_, url):
        api = client(url)
        how = {"tools": TOOLS, "tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
        whole = chat(api, **how).choices[0]
        events = [event.choices[0] for event in chat(api, stream=True, **how)]
        calls = [call.function.to_dict() for event in events for call in event.delta.tool_calls or ()]
        assert calls == [call.function.to_dict() for call in whole.message.tool_calls]
        assert whole.finish_reason == events[-1].finish_reason == "tool_calls" and whole.message.content is None
        said = [*SAID, whole.message.model_dump(exclude_none=True)]
        said += [{"role": "tool", "tool_call_id": call.id, "content": "Done."} for call in whole.message.tool_calls]
        assert chat(api, messages=said, tools=TOOLS, max_tokens=4).usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("written", "wanted"),
    [("<c>{{ c.function.name }}<a>{{ c.function.arguments }}</c>", '<c>go<a>{"to":"sea"}</c>'),
     ("<c>{{ c.function.name }}<a>{{ c.function.arguments | tojson }}</c>", '<c>go<a>{"to": "sea"}</c>')],
)  # fmt: skip
def test_arguments_of_earlier_calls_are_what_the_template_takes(written: str, wanted: str) -> None:
    """JSON texts or objects, as is learnt."""
    each = f"{{% for c in m.tool_calls or [] %}}{written}{{% endfor %}}"
    template = "{% for m in messages %}{{ m.content if m.role == 'assistant' }}" + each + "{% endfor %}"
    reader = BodyReader(toy_llm("none", template=template), ServerConfig(served_name="toy"))
    call = {"id": "x", "function": {"name": "go", "arguments": '{"to":"sea"}'}}
    asked = {"messages": [*SAID, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    (job,) = reader.chat(ChatRequest.model_validate(asked))
    assert job.prompt == tiny_tokenizer()(wanted)["input_ids"]


@pytest.mark.parametrize("models", [models for models in WRITTEN if WRITTEN[models][0].count('"arguments"')])
def test_a_call_that_is_an_object_may_be_laid_out_in_any_way(models: str) -> None:
    """Models that are not forced write objects as other JSON writers do: indented, with an id, arguments first."""
    form = form_of(models)
    field = next(name for name in ("arguments", "parameters") if f'"{name}"' in form.call)
    own = {"name": "go", field: {"to": "sea"}}
    for said in (own, dict(reversed(own.items())), own | {"id": "1"}, {"type": "function"} | own):
        for text in (json.dumps(said), json.dumps(said, indent=2), json.dumps(said).replace(":", " :")):
            body = f"[\n{text}\n]\n" if form.listed else f"\n{text}\n"
            reader = ToolReader(form)
            plain, calls = reader.push(form.opening + body + form.closing, True)
            assert not plain.strip(), text
            assert [(each["function"]["name"], each["function"]["arguments"]) for each in calls] == [
                ("go", '{"to": "sea"}')
            ]
    for wrong in ({"name": "go"}, {"name": 3, field: {}}, ["go"]):
        text = form.opening + (json.dumps([wrong]) if form.listed else json.dumps(wrong)) + form.closing
        assert ToolReader(form).push(text, True) == (text, []), wrong


def test_a_list_of_no_calls_is_no_text() -> None:
    assert ToolReader(form_of("Mistral")).push("[TOOL_CALLS][]", True) == ("", [])


@pytest.mark.parametrize("models", ["Mistral since 2025", "Kimi K2", "DeepSeek V3, R1"])
def test_a_name_may_have_white_space_in_and_around_it(models: str) -> None:
    form = form_of(models)
    call = form.call.replace("{name}", " look far ").replace("{number}", "0").replace("{arguments}", "{}")
    (found,) = ToolReader(form).push(form.opening + call + form.closing, True)[1]
    assert found["function"]["name"] == "look far"


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
        reader = ToolReader(form_of("Hermes, Qwen"))
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        found = [reader.push(part, part_number == len(parts) - 1) for part_number, part in enumerate(parts)]
        assert "".join(said for said, _ in found) == plain
        calls = [call for _, some in found for call in some]
        assert [call["index"] for call in calls] == list(range(count))
        assert all(json.loads(call["function"]["arguments"]) == {"to": "海"} for call in calls)


def test_the_rules_of_the_same_tools_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one request has read does not change the next one's."""
    offered = [FunctionTool.model_validate(tool) for tool in TOOLS]
    tokenizer, form = marked_tokenizer([]), form_of("Hermes, Qwen")
    grammars, made = Grammars(tokenizer, 320, [0]), []
    compiled = Grammars._matcher
    monkeypatch.setattr(Grammars, "_matcher", lambda self, *how: made.append(1) or compiled(self, *how))
    ids = tokenizer(WRITTEN["Hermes, Qwen"][0])["input_ids"]
    for number in range(3):
        matcher = grammars.of_tools(offered, form, forced=True, several=True)
        assert matcher.try_consume_tokens(ids) == len(ids) and len(made) == 3, number
    grammars.of_tools(offered[:1], form, forced=True, several=True)
    grammars.of_tools(offered, form, forced=False, several=True)
    assert len(made) == 5  # the tools' own schemas are known
    for number in range(100):
        grammars.of_schema({"const": number}, "x")
    assert len(grammars._kept) < 100
