"""Prompts of conversations are those of transformers, for the chat templates of real models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from real_files import real
from sakiyomi.core.errors import InputError
from sakiyomi.engine.chat_template import Dialogue
from sakiyomi.engine.rendering import Rendering
from sakiyomi.server.bodies import BodyReader
from sakiyomi.server.chat_form import ChatForm
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError
from sakiyomi.server.schema import ChatRequest
from server_toys import marked_tokenizer, toy_llm
from tool_templates import MARKS

GO = {"to": "the sea & <b>", "steps": 12}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Goes.", "parameters": {
        "type": "object", "properties": {"to": {"type": "string", "description": "Where."},
                                         "steps": {"type": "integer", "description": "How far."}},
        "required": ["to"]}}}
    for name in ("go", "look")
]  # fmt: skip
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASKED = {"role": "user", "content": "How is the sea?"}
SYSTEM = {"role": "system", "content": "Be kind."}
SAID = {"role": "assistant", "content": "It is wide."}


def call(number: int, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": f"call0{number}bcd", "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}


CALLED = {"role": "assistant", "content": "I go.", "tool_calls": [call(0, "go", GO)]}
RESULT = {"role": "tool", "tool_call_id": "call00bcd", "name": "go", "content": "Done."}
SHAPES: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "user": ([ASKED], False),
    "system": ([SYSTEM, ASKED], False),
    "calls": ([ASKED, CALLED], True),
    "results": ([ASKED, CALLED, RESULT], True),
    "null": ([ASKED, CALLED | {"content": None}, RESULT, SAID, ASKED], True),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "it?"}]}],
              False),
    "thoughts": ([ASKED, SAID | {"reasoning_content": "Wide?"}, ASKED], False),
    "turns": ([SYSTEM, ASKED, SAID, ASKED], True),
}  # fmt: skip


class Seen(Dialogue):
    """Keeps the text of its last prompt."""

    text_read = ""

    def read(self, messages: Sequence[Mapping[str, Any]], how: Rendering = Rendering()) -> list[int]:  # noqa: B008
        self.text_read = self.text(messages, how)
        return [1]


def ours(reader: BodyReader, messages: list[dict[str, Any]], tools: bool) -> str:
    reader.chat(ChatRequest.model_validate({"messages": messages, "tools": TOOLS if tools else None}))
    assert isinstance(reader._dialogue, Seen)
    return reader._dialogue.text_read


def theirs(tokenizer: Any, messages: list[dict[str, Any]], tools: bool, texts: bool) -> str:
    given = []
    for message in messages:
        given.append(dict(message))
        if "tool_calls" in message and not texts:
            calls = [each["function"] for each in message["tool_calls"]]
            given[-1]["tool_calls"] = [
                each | {"function": {"name": one["name"], "arguments": json.loads(one["arguments"])}}
                for each, one in zip(message["tool_calls"], calls, strict=True)
            ]
    how = {"tools": TOOLS if tools else None, "tokenize": False, "add_generation_prompt": True}
    return str(tokenizer.apply_chat_template(given, **how))


WITH_TOOLS = frozenset({"calls", "results", "null", "turns"})
CALLS = WITH_TOOLS - {"turns"}
WORDS = "the template does not tell of tools, or its calls are not read: they are told in words"
TEXTS = "the template leaves calls out: they are texts in the form in which the model writes them"
ABSENT = "transformers leaves a null content out, and the template fails without one"
LISTS = "the template appends to a list, which transformers' sandbox refuses"
TOGETHER = "the template makes JSON of a generator, which transformers refuses"
NEEDED = "the template needs a value that transformers does not have"
DIFFERENT: dict[str, tuple[frozenset[str], str]] = {
    "HuggingFaceTB-SmolLM3-3B": (WITH_TOOLS, WORDS),
    "google-gemma-2-2b-it": (CALLS, WORDS),  # which takes no system message: the turns with one are refused
    "llama-cpp-rwkv-world": (WITH_TOOLS, WORDS),
    "microsoft-Phi-3.5-mini-instruct": (WITH_TOOLS, WORDS),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (WITH_TOOLS, WORDS),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (WITH_TOOLS, WORDS),
    "deepseek-ai-DeepSeek-V3.1": (WITH_TOOLS, WORDS),
    "LFM2-8B-A1B": (CALLS, TEXTS),
    "LFM2.5-Instruct": (CALLS, TEXTS),
    "ibm-granite-granite-3.3-2B-Instruct": (CALLS, TEXTS),
    "Qwen-Qwen3-0.6B": (frozenset({"null"}), ABSENT),
    "unsloth-mistral-Devstral-Small-2507": (frozenset({"null"}), ABSENT),
    "Kimi-K2-Instruct": (CALLS, LISTS),
    "Kimi-K2-Thinking": (CALLS, LISTS),
    "llama-cpp-deepseek-r1": (WITH_TOOLS, TOGETHER),
    "CohereForAI-c4ai-command-r-plus-tool_use": (SHAPES.keys() - WITH_TOOLS, NEEDED),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": (SHAPES.keys() - WITH_TOOLS, NEEDED),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": (SHAPES.keys() - WITH_TOOLS, NEEDED),
    "fireworks-ai-llama-3-firefunction-v2": (frozenset(SHAPES), NEEDED),
}  # fmt: skip
"""Prompts that are not transformers', by template: in which shapes, and why. Ours says more, or theirs fails."""


def as_one_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message | {"content": "".join(part["text"] for part in message["content"])}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


@pytest.mark.thorough
def test_prompts_are_those_of_transformers() -> None:
    """Or both fail with the same message, or the difference has a reason.

    Parts of a message that the template cannot write are one text: transformers fails with them, writes them as Python
    or JSON does, or leaves them out.
    """
    folder = real("llama.cpp/models/templates")
    tokenizer = marked_tokenizer([*MARKS, "<s>", "</s>"])
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    reader = BodyReader(toy_llm("none", template=PLAIN, marks=MARKS), ServerConfig(served_name="toy"))
    counts = {"equal": 0, "refused": 0}
    for path in sorted(folder.glob("*.jinja")):
        tokenizer.chat_template = template = path.read_text(encoding="utf-8")
        reader._dialogue = Seen(tokenizer, template)
        reader.form = form = ChatForm(reader._dialogue)
        assert form.calls is not None
        texts = form.calls.way is not None and form.calls.way.texts
        found = set[str]()
        for shape, (messages, tools) in SHAPES.items():
            whole = messages if shape != "parts" or form.takes_parts else as_one_text(messages)
            try:
                expected, why = theirs(tokenizer, whole, tools, texts), ""
            except Exception as error:
                expected, why = "", str(error)
            try:
                if ours(reader, messages, tools) == expected and not why:
                    counts["equal"] += 1
                else:
                    found.add(shape)
            except (ApiError, InputError) as error:
                assert why and why in str(error), (path.stem, shape, error)
                counts["refused"] += 1
        assert found == DIFFERENT.get(path.stem, (set(),))[0], path.stem
    assert counts == {"equal": 489, "refused": 3}
