"""Formats of calls and marks of thoughts that are learnt from a chat template, and tools told in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

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
from tool_templates import ARGUMENTS, CHAT, COMMA, EACH, FUNCTIONARY, NAME, NAMED, SAID, inside, writer

PYTHON = """{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{{ ", " if not loop.last }}"""
TYPED = f"""<p name="{{{{ k }}}}" as="{{{{ 'text' if v is string else 'json' }}}}">{SAID}</p>"""
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


def replies(write: Write, form: ToolFormat, *calls: tuple[str, Mapping[str, Any]]) -> str:
    """How the template writes a reply of these calls: what is between the opening and the closing mark, with them."""
    way = form.way
    assert way is not None
    made = [
        {"id": f"call0{number}bcd", "type": "function",
         "function": {"name": name, "arguments": json.dumps(values) if way.texts else values}}
        for number, (name, values) in enumerate(calls)
    ]  # fmt: skip
    asked = {"role": "user", "content": "QUESTION"}
    text = write([asked, {"role": "assistant", **way.content, "tool_calls": made}], TOOLS, False)
    text = text.rpartition("QUESTION")[2]
    text = text[text.index(form.opening or "{") :]
    if form.closing in text and form.closing:
        return text[: text.rindex(form.closing) + len(form.closing)]
    if text.endswith("<|end|>") and not form.recipient:  # of our own templates
        return text.removesuffix("<|end|>")
    if form.closing:  # one template closes several calls, and not one
        return text + form.closing
    return text[: text.rindex("]" if form.listed else "}") + 1].removeprefix(form.opening if form.recipient else "")


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
    assert form is not None and form.way is not None and form.way.texts == (name == "texts")
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
    "LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct",  # listed: they leave earlier calls out
    "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
    "HuggingFaceTB-SmolLM3-3B",  # they know no tools
    "muse-glimmer",  # listed: every message has a head that names its recipient
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
    form = ToolFormat("toy", (), "<a>", "</a>", call=written)
    _, (call,) = ToolReader(form).push('<a>{"number": 3, "name": "look", "arguments": {}}</a>', True)
    assert call["function"] == {"name": "look", "arguments": "{}"}


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


# ---------------------------------------------------------------- templates with ways of their own


def test_replies_whose_parts_say_to_whom_they_go() -> None:
    """Texts have a head, whose beginning is in the prompt as that of a call is."""
    form = learnt(writer(FUNCTIONARY))
    assert form is not None and (form.opening, form.recipient) == (">>>", "all\n")
    call = 'go_far\n{"to": "the sea & <b>", "steps": 12, "by": ["boat", "foot"]}'
    look = 'look\n{"at": {"what": "sky"}, "far": true}'
    cases: list[tuple[str, str, list[Any]]] = [
        (call, "", [GO]), (f"{call}>>>{look}", "", [GO, LOOK]), ("all\nThe sea is wide.", "The sea is wide.", []),
        (f"all\nI go. {{}}>>>{call}", "I go. {}", [GO]), ("The sea", "The sea", []), ("al", "al", []), ("", "", []),
        ('{"a": 1}', '{"a": 1}', []),
    ]  # fmt: skip
    for text, plain, calls in cases:
        for size in (1, 3, 7, 1000):
            assert read(form, text, size) == (plain, calls), text
    offered = [FunctionTool.model_validate(tool) for tool in TOOLS]
    tokenizer = marked_tokenizer([])
    for forced, several in ((True, True), (False, True), (True, False), (False, False)):
        matcher = Grammars(tokenizer, 320, [0]).of_tools(offered, form, forced=forced, several=several)
        for text, _, calls in cases[:4]:
            ids = tokenizer(text)["input_ids"]
            right = (not forced or (bool(calls) and not text.startswith("all"))) and len(calls) <= 1 + several
            assert (matcher.validate_tokens([*ids, 0]) == len(ids) + 1) == right, text
            assert (
                matcher.validate_tokens([*tokenizer(text.replace("go_far", "go_out"))["input_ids"], 0]) < len(ids) + 1
                or "go_far" not in text
            )


def test_the_head_of_a_text_is_read_without_tools_too() -> None:
    reader = BodyReader(toy_llm("none", template=FUNCTIONARY), ServerConfig(served_name="toy"))
    (job,) = reader.chat(ChatRequest.model_validate({"model": "toy", "messages": [ASKED]}))
    assert job.reply.tools is not None and job.reply.tools.recipient == "all\n"
    formed = {"messages": [ASKED], "response_format": {"type": "json_object"}}
    assert reader.chat(ChatRequest.model_validate(formed))[0].reply.tools is None


SILENT = {
    "absent": "{% if m.content is defined %}{{ m.content }}{% else %}CALLS{% endif %}",
    "empty": "{{ m.content | trim if m.content else 'CALLS' + m.content }}",
    "null": "{% if m.content is defined and m.content is none %}CALLS{% else %}{{ m.content }}{% endif %}",
}


@pytest.mark.parametrize("silent", SILENT)
def test_earlier_calls_are_given_in_the_way_that_the_template_writes(silent: str) -> None:
    """Some templates write calls only where the content is absent, empty or null."""
    calls = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    if silent == "empty":
        template = PLAIN.replace("{{ m.content }}", "{{ raise_exception('no') if m.content is not string }}" + calls)
    else:
        template = PLAIN.replace("{{ m.content }}", SILENT[silent].replace("CALLS", calls))
    reader = BodyReader(toy_llm("none", template=template), ServerConfig(served_name="toy"))
    call = CALL | {"function": {"name": "look", "arguments": '{"far": true}'}}
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (job,) = reader.chat(ChatRequest.model_validate({"messages": messages}))
    text = reader._llm.tokenizer.decode(job.prompt)
    assert '<call>{"name": "look", "arguments": {"far": true}}</call>' in text
    assert reader.form.calls is not None and reader.form.calls.way is not None
    assert reader.form.calls.way.silent == silent


@pytest.mark.parametrize(
    ("words", "written"),
    [("List of tools: ", "<|tool_call_start|>[look(far=True)]<|tool_call_end|>"),
     ("<|tool_call|> followed by a list", '<|tool_call|>[{"name": "look", "arguments": {"far": true}}]')],
)  # fmt: skip
def test_calls_that_a_template_leaves_out_are_texts(words: str, written: str) -> None:
    """As the model writes them, so that it knows what it has called."""
    template = "{{ 'WORDS' ~ tools if tools }}".replace("WORDS", words) + PLAIN
    reader = BodyReader(toy_llm("none", template=template), ServerConfig(served_name="toy"))
    call = CALL | {"function": {"name": "look", "arguments": '{"far": true}'}}
    for content in (None, "Well. "):
        messages = [ASKED, {"role": "assistant", "content": content, "tool_calls": [call]},
                    {"role": "tool", "content": "wide", "tool_call_id": "x"}]  # fmt: skip
        (job,) = reader.chat(ChatRequest.model_validate({"messages": messages, "tools": TOOLS}))
        assert f"{content or ''}{written}" in reader._llm.tokenizer.decode(job.prompt)
    form = reader.form.calls
    assert form is not None and read(form, written, 3) == ("", [("look", {"far": True})])


def test_what_templates_need_beyond_the_values_of_transformers() -> None:
    for template, text in (
        ("{{ bos_token + missing_token }}a", "a"),
        ("{% for t in tools %}{{ t.function.name }}{% endfor %}b", "b"),
        ("{{ functions + datetime[3:4] }}", "[] "),
    ):
        assert writer(template)([ASKED], (), True).removeprefix("<s>") == text
    assert '"go_far"' in writer("{{ functions + '' }}")([ASKED], TOOLS, True)
    with pytest.raises(InputError, match="'nothing' is undefined"):
        writer("{{ nothing + '' }}")([ASKED], (), True)


def test_a_template_that_writes_calls_and_does_not_tell_of_tools() -> None:
    """The model is told of them in words, and of the form that its template writes."""
    calls = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    reader = BodyReader(
        toy_llm("none", template=PLAIN.replace("{{ m.content }}", "{{ m.content }}" + calls)),
        ServerConfig(served_name="toy"),
    )
    call = CALL | {"function": {"name": "look", "arguments": '{"far": true}'}}
    messages = [ASKED, {"role": "assistant", "content": "Well.", "tool_calls": [call]}]
    (job,) = reader.chat(ChatRequest.model_validate({"messages": messages, "tools": TOOLS}))
    text = reader._llm.tokenizer.decode(job.prompt)
    assert reader.form.calls is not None and reader.form.calls.opening == "<call>" and '"go_far"' in text
    assert 'in this form: <call>{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}</call>' in text
    assert 'Well.<call>{"name": "look", "arguments": {"far": true}}</call>' in text


@pytest.mark.parametrize(
    ("written", "text"),
    [("{{ m.content }}", "<|user|>How is it?"), ("{{ m.content | trim }}", "<|user|>How is it?"),
     ("{% for p in m.content %}{{ p.text | trim }}{% endfor %}", "<|user|>How isit?")],
)  # fmt: skip
def test_parts_are_given_to_templates_that_write_them(written: str, text: str) -> None:
    """Others get one text."""
    reader = BodyReader(
        toy_llm("none", template=PLAIN.replace("{{ m.content }}", written)), ServerConfig(served_name="toy")
    )
    parts = [{"type": "text", "text": "How is "}, {"type": "text", "text": "it?"}]
    (job,) = reader.chat(ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}]}))
    assert reader._llm.tokenizer.decode(job.prompt).startswith(text)
