"""Answers of models whose calls, thoughts and text are known from the tests of llama.cpp, read as the server does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_answers import Answer, Message, cases_of, read_answers
from real_files import real
from sakiyomi import LLM
from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Step
from sakiyomi.server.bodies import BodyReader
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError
from sakiyomi.server.jobs import Event, Job
from sakiyomi.server.replies import Piece, Sample
from sakiyomi.server.schema import ChatRequest
from server_toys import marked_tokenizer
from tool_templates import MARKS
from toys import tiny_llama

SIZES = (100_000, 1, 3, 7)
"""Characters of each piece."""
ENDS = ("<|role_end|>", "<|eot|>", "<|END_OF_TURN_TOKEN|>")
"""Tokens at the end of some answers: the engine stops at them, and they are no text."""
GEMMA = ("<|channel>", "<channel|>")
"""Special tokens of Gemma 4, which other templates do not have."""
ASKED = Message("user", "Hey there!")
"""What llama.cpp's cases ask, where they do not say it."""

Said = tuple[str, str, list[tuple[str, Any]]]
"""Thoughts, text, and calls with their arguments."""


def request(answer: Answer) -> dict[str, Any]:
    """The body of a request for this answer. Options that a template does not know have no effect on it."""
    options = answer.options
    thinking = options.get("enable_thinking", True)
    body: dict[str, Any] = {
        "messages": [*map(_sent, options.get("messages", [ASKED]))],
        "chat_template_kwargs": {"enable_thinking": thinking, "thinking": thinking},
        # Without a format llama.cpp leaves thoughts in the text.
        "reasoning_format": "none" if options.get("reasoning_format", "NONE").endswith("NONE") else "auto",
    }
    if tools := options.get("tools"):
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        body["parallel_tool_calls"] = options.get("parallel_tool_calls", False)
    if "tool_choice" in options:
        body["tool_choice"] = options["tool_choice"].rpartition("_")[2].lower()
    if "json_schema" in options:
        schema = {"name": "reply", "schema": json.loads(options["json_schema"])}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if not options.get("continue_final_message", "NONE").endswith("NONE"):
        body["continue_final_message"] = True
    elif not options.get("add_generation_prompt", True):
        body["add_generation_prompt"] = False
    return body


def _sent(message: Message) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        sent["reasoning_content"] = message.reasoning_content
    if message.calls:
        sent["tool_calls"] = [
            {"id": message.id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in message.calls
        ]
    if message.tool_call_id:
        sent["tool_call_id"] = message.tool_call_id
    return sent


def wanted(answer: Answer, prompt: str) -> Said:
    """What is in the answer, as llama.cpp says.

    llama.cpp repeats what the prompt already has of the message. Of an answer that is not over it gives an incomplete
    call; the server gives calls when they are complete.
    """
    expect, options = answer.expect, answer.options
    calls = [] if "is_partial" in options else expect.calls
    begun = options["messages"][-1] if "continue_final_message" in options else Message()
    said = expect.content.removeprefix(begun.content)
    thoughts = expect.reasoning_content.removeprefix(begun.reasoning_content)
    if request(answer)["reasoning_format"] == "none":
        said = _behind(prompt, said)
    elif not answer.text.startswith(thoughts):
        thoughts = _behind(prompt, thoughts)
    return (
        thoughts.strip(),
        said.strip(),
        [(name, json.loads(arguments or "{}")) for name, arguments in calls],
    )


def _behind(prompt: str, said: str) -> str:
    """What is said, without the beginning that the prompt ends with."""
    return said[next(n for n in range(len(said), -1, -1) if prompt.endswith(said[:n])) :]


def said(job: Job, tokenizer: Any, text: str, size: int, *, over: bool = True) -> Said:
    """What the server gives of a text in pieces of this size; ``over``: it is the whole answer."""
    sample = Sample(job, None, tokenizer, lambda count: "0" * 2 * count)  # type: ignore[arg-type]
    whole = Piece(0)
    for start in range(0, len(text), size):
        part, last = text[start : start + size], over and start + size >= len(text)
        step = Step(part, tuple(tokenizer(part)["input_ids"]), finish_reason="stop" if last else None)
        whole.add(sample.read(Event(job, step)))
    calls = [call["function"] for call in whole.calls]
    return (
        whole.thoughts.strip(), whole.text.strip(), [(call["name"], json.loads(call["arguments"])) for call in calls]
    )  # fmt: skip


def model() -> LLM:
    """Tiny, with a long context."""
    tokenizer = marked_tokenizer([*MARKS, *GEMMA, "<s>"])
    tokenizer.bos_token = "<s>"
    return LLM((tiny_llama(max_position_embeddings=1 << 17), tokenizer), "none", compile=False)


def differences(llm: LLM, templates: Path, answers: Sequence[Answer]) -> Mapping[str, Any]:
    """What is read otherwise than llama.cpp says, by case."""
    found: dict[str, Any] = {}
    for template, cases in cases_of([*answers]):
        try:
            reader = BodyReader(
                llm, ServerConfig(served_name="toy", chat_template=str(templates / f"{template}.jinja"))
            )
        except InputError as error:
            found |= {case.name: str(error) for case in cases}
            continue
        for case in cases:
            try:
                (job,) = reader.chat(ChatRequest.model_validate(request(case)))
            except (ApiError, InputError) as error:
                found[case.name] = str(error)
                continue
            text = case.text.removesuffix(next(filter(case.text.endswith, ENDS), ""))
            right = wanted(case, llm.tokenizer.decode(job.prompt))
            for size in SIZES:
                got = said(job, llm.tokenizer, text, size, over=not case.options.get("is_partial"))
                if got != right:
                    found[case.name] = size, got, right
                    break
    return found


def named(template: str, *numbers: int) -> list[str]:
    return [f"{template} {number}" for number in numbers]


EXPLAINED: Mapping[str, Sequence[str]] = {
    "a reply under a grammar has no thoughts": [
        *named("Qwen3.5-4B", 10, 19, 24), *named("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 8),
        *named("google-gemma-4-31B-it", 10),
    ],
    "a reply under a grammar is JSON, without a block of Markdown around it": [
        *named("mistralai-Ministral-3-14B-Reasoning-2512", 7), *named("meta-llama-Llama-3.1-8B-Instruct", 2),
    ],
    "a 400: tools and response_format cannot be combined": named("Cohere2MoE", 4),
    "a 400: the template knows no thoughts that could be continued": named("moonshotai-Kimi-K2", 4),
    "a last message with thoughts alone is continued inside them": named("inclusionai-ling-3.0-flash", 20),
    "a call ends with its marks, which the grammar demands": named("Kimi-K2-Thinking", 12, 13),
    "a text and an object are both allowed; what is written like an object is one": named("MiniMax-M3", 18),
    "reasoning_format none gives thoughts in channels without their marks": named("openai-gpt-oss-120b", 4),
}  # fmt: skip
"""What is read otherwise, and why."""


def test_what_an_answer_is_made_of() -> None:
    """The cases are read out of C++; those of a few forms."""
    answers = {answer.name: answer for answer in read_answers(real("llama.cpp/tests/test-chat.cpp"))}
    assert len(answers) > 400
    assert sum(map(len, EXPLAINED.values())) < 0.04 * len(answers)
    found = differences(model(), real("llama.cpp/models/templates"), list(answers.values())[:25])
    assert found.keys() == {name for names in EXPLAINED.values() for name in names if name.startswith("Qwen3.5")}


@pytest.mark.thorough
def test_answers_are_read_as_llama_cpp_reads_them() -> None:
    """Whole and in pieces."""
    answers = read_answers(real("llama.cpp/tests/test-chat.cpp"))
    found = differences(model(), real("llama.cpp/models/templates"), answers)
    explained = {name: why for why, names in EXPLAINED.items() for name in names}
    assert {name: found[name] for name in found.keys() - explained.keys()} == {}
    assert explained.keys() - found.keys() == set()
