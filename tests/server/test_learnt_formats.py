"""Formats of calls and marks of thoughts that are learnt from a chat template, and tools told in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from real_files import real
from sakiyomi.core.errors import InputError
from sakiyomi.server.bodies import BodyReader
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError
from sakiyomi.server.fields import value_of
from sakiyomi.server.general_tools import GENERAL, told
from sakiyomi.server.grammar import Grammars
from sakiyomi.server.learnt_format import Write, learnt
from sakiyomi.server.learnt_marks import learnt_text, learnt_thoughts
from sakiyomi.server.said import TextReader
from sakiyomi.server.schema import ChatRequest, FunctionTool, TokenizeRequest
from sakiyomi.server.thoughts import THINK
from sakiyomi.server.tools import ToolFormat, ToolReader, listed_format
from server_toys import marked_tokenizer, toy_llm

OWN = """{%- macro own(v) -%}{%- if v is string -%}<|"|>{{ v }}<|"|>{%- elif v is mapping -%}{{ "{" }}\
{%- for a, b in v.items() -%}{{ a }}:{{ own(b) }}{{ "," if not loop.last }}{%- endfor -%}{{ "}" }}\
{%- elif v is iterable -%}[{% for a in v %}{{ own(a) }}{{ "," if not loop.last }}{% endfor %}]\
{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"""
CHAT = (
    OWN
    + """{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content or "" }}\
{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}<|end|>{% endfor %}\
{{ "<|assistant|>" if add_generation_prompt }}"""
)
"""A template, with CALL for how it writes one of the calls."""
EACH = "{% for k, v in f.arguments.items() %}PAIR{% endfor %}"
SAID = "{{ v if v is string else v | tojson }}"
PYTHON = """{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{{ ", " if not loop.last }}"""
TYPED = f"""<p name="{{{{ k }}}}" as="{{{{ 'text' if v is string else 'json' }}}}">{SAID}</p>"""
NAMED = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'


def inside(begin: str, end: str, call: str) -> str:
    """How calls are written one after the other between marks."""
    return f"{{{{ '{begin}' if loop.first }}}}{call}{{{{ '{end}' if loop.last }}}}"


NAME, ARGUMENTS, COMMA = "{{ f.name }}", "{{ f.arguments | tojson }}", "{{ ', ' if not loop.last }}"
NUMBERED = '{"number": "{{ loop.index0 }}", ' + NAMED[1:] + COMMA
CALLS = {
    "objects between marks": f"<tool_call>\n{NAMED}\n</tool_call>",
    "objects alone": NAMED + "{{ raise_exception('one call a reply') if not loop.last }}",
    "objects one after the other": inside("<calls>", "</calls>", f"\n{NAMED}\n"),
    "a list": inside("<calls>[", "]</calls>", NAMED + COMMA),
    "a name as a field": inside("<calls>[", "]</calls>", f'{{"{NAME}": {ARGUMENTS}}}' + COMMA),
    "a number in an object": inside("<a>[", "]</a>", NUMBERED),
    "more fields": inside("<a>[", "]</a>", '{"type": "function", "level": 0, ' + NAMED[1:] + COMMA),
    "a name before an object": f"[CALLS]{NAME}[ARGS]{ARGUMENTS}",
    "calls with marks of their own": inside("<calls>", "</calls>", f"<call>{NAME}<sep>{ARGUMENTS}</call>"),
    "numbers": inside("<calls>", "</calls>", f"<call>do.{NAME}:{{{{ loop.index0 }}}}<sep>{ARGUMENTS}</call>"),
    "ids": f"<call>{{{{ c.id }}}}<name>{NAME}<args>{ARGUMENTS}</call>",
    "texts": f"<call>{NAME}<args>{{{{ f.arguments }}}}</call>",
    "pairs": f"<call>\n<do={NAME}>\n" + EACH.replace("PAIR", f"<p={{{{ k }}}}>\n{SAID}\n</p>\n") + "</do>\n</call>",
    "keys and values": f"<call>{NAME}\n"
    + EACH.replace("PAIR", f"<key>{{{{ k }}}}</key>\n<value>{SAID}</value>\n")
    + "</call>",
    "typed pairs": inside("<calls>", "</calls>", f'<do name="{NAME}">' + EACH.replace("PAIR", TYPED) + "</do>"),
    "as in Python": inside("<calls>[", "]</calls>", f"{NAME}({EACH.replace('PAIR', PYTHON)})" + COMMA),
    "quotes of its own": f"<call>call:{NAME}{{{{ own(f.arguments) }}}}</call>",
}
GO: tuple[str, dict[str, Any]] = ("go_far", {"to": "the sea & <b>", "steps": 12, "by": ["boat", "foot"]})
LOOK: tuple[str, dict[str, Any]] = ("look", {"at": {"what": "sky"}, "far": True})


def schema(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}
    properties = {name: {"type": kinds[type(value)], "description": "d"} for name, value in values.items()}
    for each in properties.values():
        each |= {"array": {"items": {"type": "string"}}, "object": {"additionalProperties": {"type": "string"}}}.get(
            str(each["type"]), {}
        )
    return {"type": "object", "properties": properties, "required": [*values], "additionalProperties": False}


SCHEMAS = {name: schema(values) for name, values in (GO, LOOK)}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMAS[name]}}
    for name in SCHEMAS
]


def writer(template: str) -> Write:
    """What a template writes; what it raises is an InputError."""

    def write(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], new: bool) -> str:
        words = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": new}
        try:
            found, _ = render_jinja_template([[*messages]], [*tools] or None, chat_template=template, **words)
            return str(found[0])
        except Exception as error:
            raise InputError(str(error)) from None

    return write


def replies(write: Write, form: ToolFormat, *calls: tuple[str, Mapping[str, Any]]) -> str:
    """How the template writes a reply of these calls: what is between the opening and the closing mark, with them."""
    made = [
        {"id": f"call0{number}bcd", "type": "function",
         "function": {"name": name, "arguments": json.dumps(values) if form.texts else values}}
        for number, (name, values) in enumerate(calls)
    ]  # fmt: skip
    asked = {"role": "user", "content": "QUESTION"}
    text = write([asked, {"role": "assistant", "content": "", "tool_calls": made}], TOOLS, False)
    text = text.rpartition("QUESTION")[2]
    if form.opening:
        text = text[text.index(form.opening) :]
        return text[: text.rindex(form.closing) + len(form.closing)] if form.closing else text.removesuffix("<|end|>")
    return text[text.index("{") : text.rindex("}") + 1]


def read(form: ToolFormat, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    """What is text and what is called, of a text in pieces."""
    reader = ToolReader(form, schemas=SCHEMAS)
    parts = [reader.push(text[i : i + size], False) for i in range(0, len(text), size)] + [reader.push("", True)]
    calls = [call["function"] for _, some in parts for call in some]
    return "".join(words for words, _ in parts), [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("name", CALLS)
def test_what_a_template_writes_is_learnt(name: str) -> None:
    """Calls in pieces of any size, between words."""
    write = writer(CHAT.replace("CALL", CALLS[name]))
    form = learnt(write)
    assert form is not None and form.texts == (name == "texts")
    calls = [GO] if name == "objects alone" else [GO, LOOK]
    text = replies(write, form, *calls)
    for size in (1, 3, 7, 1000):
        assert read(form, text, size) == ("", calls)
        if form.opening:
            assert read(form, f"Well.{text}", size) == ("Well.", calls)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_forced_calls_are_written_as_the_template_does(name: str, special: bool) -> None:
    """The grammar takes them, and nothing that the schema does not allow."""
    write = writer(CHAT.replace("CALL", CALLS[name]))
    form = learnt(write)
    assert form is not None
    text = replies(write, form, GO)
    tokenizer = marked_tokenizer(
        [form.opening, form.closing] if special and form.opening and form.closing else [], special
    )
    offered = [FunctionTool.model_validate(tool) for tool in TOOLS]
    matcher = Grammars(tokenizer, 320, [0]).of_tools(offered, form, forced=True, several=True)
    for said, right in (
        (text, True), (text.replace("go_far", "go_out"), False), (text.replace("steps", "miles"), False),
        (text.replace("12", "many"), False),
    ):  # fmt: skip
        ids = tokenizer(said)["input_ids"]
        assert (matcher.validate_tokens([*ids, 0]) == len(ids) + 1) == right, said


@pytest.mark.parametrize(
    "call", ["", "{{ f.name }}", "<call>{{ f.name | upper }} {{ f.arguments | tojson }}</call>",
             "<call>{{ f.name }} {{ f.arguments | tojson | replace('2', '3') }}</call>"],
)  # fmt: skip
def test_what_does_not_say_the_calls_is_not_learnt(call: str) -> None:
    assert learnt(writer(CHAT.replace("CALL", call))) is None


@pytest.mark.parametrize(("most", "right"), [(0, "[]"), (1, "['a']"), (2, "['a', 'b']")])
def test_lists_as_in_python_are_no_longer_than_the_schema_says(most: int, right: str) -> None:
    form = learnt(writer(CHAT.replace("CALL", CALLS["as in Python"])))
    assert form is not None
    wanted = {"type": "array", "items": {"type": "string"}, "maxItems": most}
    parameters = {"type": "object", "properties": {"by": wanted}, "required": ["by"]}
    offered = FunctionTool.model_validate({"type": "function", "function": {"name": "go", "parameters": parameters}})
    tokenizer = marked_tokenizer([])
    matcher = Grammars(tokenizer, 320, [0]).of_tools([offered], form, forced=True, several=False)
    for by, fits in ((right, True), ("['a', 'b', 'c']", False)):
        ids = tokenizer(f"<calls>[go(by={by})]</calls>")["input_ids"]
        assert (matcher.validate_tokens([*ids, 0]) == len(ids) + 1) == fits


TEXTS = {
    "<text>{{ m.content }}</text>": ("<text>", "</text><|end|>"),
    "<|open|>said<|sep|>{{ m.content }}<|close|>said<|sep|>": (
        "<|open|>said<|sep|>", "<|close|>said<|sep|><|end|>"
    ),
    "<think></think>{{ m.content }}": None,
    "{{ m.content }}": None,
}  # fmt: skip


@pytest.mark.parametrize("written", TEXTS)
def test_marks_of_the_text_are_learnt(written: str) -> None:
    """They are taken away, with or without the mark of the reply's end, which the engine may have taken away before."""
    marks = learnt_text(writer(CHAT.replace('{{ m.content or "" }}', written)), THINK)
    assert marks == TEXTS[written]
    if marks is None:
        return
    first = marks.closing.removesuffix("<|end|>")
    for text, right in (
        (f"{marks.opening}Hello.{marks.closing}", "Hello."), (f"{marks.opening}Hello.{first}", "Hello."),
        (f"Well.{marks.opening}Hello <.{first}", "Well.Hello <."), (f"Hello.{first}", f"Hello.{first}"),
        (f"{marks.opening}Hello", "Hello"), (marks.opening[:4], marks.opening[:4]),
    ):  # fmt: skip
        for size in (1, 3, 7, 1000):
            reader = TextReader(marks)
            parts = [reader.push(text[i : i + size], False) for i in range(0, len(text), size)]
            assert "".join([*parts, reader.push("", True)]) == right, (text, size)


THOUGHTS = {
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}": ("<think>", "</think>"),
    "<think>{{ m.thinking }}</think>": ("<think>", "</think>"),
    "<|channel>thought\n{{ m.reasoning_content }}\n<channel|>": ("<|channel>thought", "<channel|>"),
    "[THINK]{{ m.reasoning_content }}[/THINK]": ("[THINK]", "[/THINK]"),
    "{% if m.content is not string %}[T]{{ m.content[0].thinking }}[/T]{{ m.content[1].text }}{% endif %}": (
        "[T]",
        "[/T]",
    ),
    "{% if m.tool_calls %}<t>{{ m.thinking }}</t>{{ m.tool_calls[0].function.name }}{% endif %}": ("<t>", "</t>"),
    "{% if m.tool_calls %}{{ m.thinking }}<call>{{ m.tool_calls[0].function.name }}{% endif %}": None,
    "<|open|>think<|sep|>{{ m.thinking }}<|close|>think<|sep|><|open|>said<|sep|>": (
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
    ),
    "": None,
}


@pytest.mark.parametrize("written", THOUGHTS)
def test_marks_of_thoughts_are_learnt(written: str) -> None:
    assert (
        learnt_thoughts(writer(CHAT.replace('{{ m.content or "" }}', written + "{{ m.content }}"))) == THOUGHTS[written]
    )


# ---------------------------------------------------------------- templates of real models

NOT_LEARNT = {
    "Kimi-K2-Instruct", "Kimi-K2-Thinking",  # they append to a list, which the sandbox refuses
    "llama-cpp-deepseek-r1", "fireworks-ai-llama-3-firefunction-v2",  # they fail with any tools
    "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "ibm-granite-granite-3.3-2B-Instruct",  # they leave earlier calls out
    "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",  # they know no tools
    "Kimi-K3", "meetkai-functionary-medium-v3.2", "muse-glimmer",  # every part of a reply has a head
}  # fmt: skip


def test_templates_of_real_models() -> None:
    """Each but a few is learnt, and what it writes is read."""
    folder = real("llama.cpp/models/templates")
    found = set[str]()
    for path in sorted(Path(folder).glob("*.jinja")):
        write = writer(path.read_text(encoding="utf-8"))
        form = learnt(write)
        if form is None:
            found.add(path.stem)
            continue
        if (known := listed_format(path.read_text(encoding="utf-8"))) is not None and known.channels:
            continue
        text = replies(write, form, GO)
        for size in (1, 3, 7, 1000):
            assert read(form, text, size)[1] == [GO], path.stem
    assert found == NOT_LEARNT


# ---------------------------------------------------------------- tools in words

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)
STRICT = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + PLAIN
ASKED = {"role": "user", "content": "How is the sea?"}
CALL = {"id": "x", "type": "function", "function": {"name": "look", "arguments": {"far": True}}}


def test_calls_and_results_become_words() -> None:
    messages = [
        {"role": "system", "content": "Be kind."}, ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "wide", "tool_call_id": "x"}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    system, asked, called, result = told(messages, TOOLS, system=True)
    assert system["content"].startswith("Be kind.\n\nYou can call functions") and '"go_far"' in system["content"]
    assert asked == ASKED and called == {"role": "assistant", "content": '{"name": "look", "arguments": {"far": true}}'}
    assert result == {"role": "user", "content": "Result of look: wide\n\nAnd?"}
    assert told([ASKED], TOOLS, system=True)[0]["role"] == "system"
    (only,) = told([ASKED], TOOLS, system=False)
    assert only["role"] == "user" and only["content"].endswith("How is the sea?") and '"look"' in only["content"]
    assert told([ASKED], [], system=True) == [ASKED]
    seen = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    (both,) = told([seen], TOOLS, system=False)
    assert both["content"][-2:] == seen["content"] and "go_far" in both["content"][0]["text"]


def test_a_number_of_a_call_may_be_a_number() -> None:
    """Models write what templates put in quotes without them, too."""
    written = '{"number": "{number}", "name": "{name}", "arguments": {arguments}}'
    form = ToolFormat("toy", (), "<a>", "</a>", call=written, id="{name}:{number}")
    _, (call,) = ToolReader(form).push('<a>{"number": 3, "name": "look", "arguments": {}}</a>', True)
    assert call["id"] == "look:3"


def test_the_tokens_of_a_conversation_are_those_of_its_reply() -> None:
    """Of one with calls too, which become words."""
    reader = BodyReader(toy_llm("none", template=PLAIN), ServerConfig(served_name="toy"))
    call = CALL | {"function": {"name": "look", "arguments": '{"far": true}'}}
    messages = [
        ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "wide", "tool_call_id": "x"},
    ]
    (job,) = reader.chat(ChatRequest.model_validate({"messages": messages}))
    assert reader.tokenize(TokenizeRequest.model_validate({"messages": messages})) == job.prompt
    assert "Result of look: wide" in reader._llm.tokenizer.decode(job.prompt)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [("boolean", "True", True), ("array", "['a', 1]", ["a", 1]), ("array", "{1, 2}", "{1, 2}"),
     ("object", "{1: {2}}", "{1: {2}}"), ("null", "None", None), (["string", "array"], "(1, 2)", "(1, 2)"),
     ("array", "b'x'", "b'x'"), ("number", "", "")],
)  # fmt: skip
def test_values_as_python_writes_them(kind: Any, text: str, value: Any) -> None:
    """Where no text is allowed; what JSON does not have stays as it was written."""
    assert value_of(text, {"properties": {"a": {"type": kind}}}, "a") == value


@pytest.mark.parametrize("template", [PLAIN, STRICT])
def test_a_template_without_tools_has_the_general_form(template: str) -> None:
    reader = BodyReader(toy_llm("none", template=template), ServerConfig(served_name="toy"))
    asked = {"model": "toy", "messages": [ASKED], "tools": TOOLS}
    (job,) = reader.chat(ChatRequest.model_validate(asked))
    assert reader.form.calls is GENERAL and job.reply.tools is GENERAL
    text = reader._llm.tokenizer.decode(job.prompt)
    assert '"go_far"' in text and text.index("go_far") < text.index("How is the sea?")
    (plain,) = reader.chat(ChatRequest.model_validate({"model": "toy", "messages": [ASKED]}))
    assert len(plain.prompt) < len(job.prompt)


def test_without_a_template_tools_are_refused() -> None:
    reader = BodyReader(toy_llm("none", template=None), ServerConfig(served_name="toy"))
    with pytest.raises(ApiError, match="no chat template"):
        reader.chat(ChatRequest.model_validate({"model": "toy", "messages": [ASKED], "tools": TOOLS}))


def test_thoughts_are_told_apart_by_the_marks_of_the_template() -> None:
    template = PLAIN.replace("{{ m.content }}", "[THINK]{{ m.reasoning_content }}[/THINK]{{ m.content }}")
    for text, marks in ((template, ("[THINK]", "[/THINK]")), (PLAIN + "{#</think>#}", THINK), (PLAIN, None)):
        reader = BodyReader(toy_llm("none", template=text), ServerConfig(served_name="toy"))
        assert reader.form.thoughts == marks
        (job,) = reader.chat(ChatRequest.model_validate({"model": "toy", "messages": [ASKED]}))
        assert (job.reply.reasoning is None) == (marks is None) and job.reply.marks == (marks or THINK)
