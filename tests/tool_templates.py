"""Chat templates that write calls of tools as models do, and the formats that are learnt from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sakiyomi.engine.rendering import Rendering, rendered
from sakiyomi.server.learnt_format import Write, learnt
from sakiyomi.server.tools import FORMATS, ToolFormat
from server_toys import marked_tokenizer

_OWN = """{%- macro own(v) -%}{%- if v is string -%}<|"|>{{ v }}<|"|>{%- elif v is mapping -%}{{ "{" }}\
{%- for a, b in v.items() -%}{{ a }}:{{ own(b) }}{{ "," if not loop.last }}{%- endfor -%}{{ "}" }}\
{%- elif v is iterable -%}[{% for a in v %}{{ own(a) }}{{ "," if not loop.last }}{% endfor %}]\
{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"""
CHAT = (
    _OWN
    + """{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content or "" }}\
{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}<|end|>{% endfor %}\
{{ "<|assistant|>" if add_generation_prompt }}"""
)
"""A template, with CALL for how it writes one of the calls."""
EACH = "{% for k, v in f.arguments.items() %}PAIR{% endfor %}"
SAID = "{{ v if v is string else v | tojson }}"
KIND = (
    "{{ 'boolean' if v is boolean else 'null' if v is none else 'number' if v is number else 'string' if v is string "
    "else 'object' if v is mapping else 'array' }}"
)
NAME, ARGUMENTS, COMMA = "{{ f.name }}", "{{ f.arguments | tojson }}", "{{ ', ' if not loop.last }}"
NAMED = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'


def inside(begin: str, end: str, call: str) -> str:
    """How calls are written one after the other between marks."""
    return f"{{{{ '{begin}' if loop.first }}}}{call}{{{{ '{end}' if loop.last }}}}"


_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
MODELS = {
    "Mistral since 2025": f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}",
    "Mistral": inside("[TOOL_CALLS] [", "]", NAMED + COMMA),
    "Llama 3 and 4": f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}'
    + "{{ raise_exception('one call a reply') if not loop.last }}",
    "Phi 4 mini": f"<|tool_call|>{NAMED}<|/tool_call|>",
    "Phi 4 mini by vLLM's template": inside("functools[", "]", NAMED + COMMA),
    "Nemotron": inside("<TOOLCALL>[", "]</TOOLCALL>", NAMED + COMMA),
    "DeepSeek V3, R1": inside("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{{{{ f.arguments }}}}\n```<｜tool▁call▁end｜>"),
    "DeepSeek V3.1": inside("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{{{{ f.arguments }}}}<｜tool▁call▁end｜>"),
    "Kimi K2": inside(*_SECTION, f"<|tool_call_begin|>functions.{NAME}:{{{{ loop.index0 }}}}"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"),
    "Kimi K3": inside("<|open|>tools<|sep|>", "<|close|>tools<|sep|>",
        f'<|open|>call tool="{NAME}" index="{{{{ loop.index }}}}"<|sep|>'
        + EACH.replace("PAIR", f'<|open|>argument key="{{{{ k }}}}" type="{KIND}"<|sep|>{SAID}<|close|>argument<|sep|>')
        + "<|close|>call<|sep|>"),
    "Qwen3-Coder": f"<tool_call>\n<function={NAME}>\n"
    + EACH.replace("PAIR", f"<parameter={{{{ k }}}}>\n{SAID}\n</parameter>\n")
    + "</function>\n</tool_call>",
    "GLM 4.5 to 4.7": f"<tool_call>{NAME}\n"
    + EACH.replace("PAIR", f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{SAID}</arg_value>\n")
    + "</tool_call>",
    "Hermes, Qwen": f"<tool_call>\n{NAMED}\n</tool_call>",
}  # fmt: skip
"""How models write one of the calls."""
FUNCTIONARY = (
    """{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}\
{{ '>>>all\\n' ~ m.content if m.content }}{% for c in m.tool_calls or [] %}>>>{{ c.function.name }}\\n"""
    + """{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}\
{{ '<|assistant|>>>>' if add_generation_prompt }}"""
).replace("}}\\n{{", "}}\n{{")
"""A template of replies whose parts say to whom they go."""
MARKS = tuple(dict.fromkeys(mark for form in FORMATS if form.channels for mark in form.channels.marks))
"""Of messages in channels."""
_TOKENIZER = marked_tokenizer([])


def chat(models: str) -> str:
    """The template of models of this name, or with such calls."""
    return CHAT.replace("CALL", MODELS.get(models, models))


def writer(template: str) -> Write:
    """What a template writes."""

    def write(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], new: bool) -> str:
        return rendered(_TOKENIZER, template, messages, Rendering(tools, ending="new" if new else "none", nulls=True))

    return write


@cache
def form_of(models: str) -> ToolFormat:
    """The format of these models: listed, or learnt from their template."""
    for form in FORMATS:
        if form.models == models:
            return form
    form = learnt(writer(chat(models)))
    assert form is not None, models
    return form
