"""Thoughts of a reply, told apart however a text is cut, and where they stand in the objects of each interface."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from sakiyomi.core.outputs import Step
from sakiyomi.server.bodies import BodyReader
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError
from sakiyomi.server.jobs import Event
from sakiyomi.server.replies import Sample
from sakiyomi.server.schema import ChatRequest, TokenizeRequest
from sakiyomi.server.thoughts import ChannelReader, ReasoningReader, ThoughtMarks
from server_toys import running, toy_llm, web
from tool_templates import form_of

TEXTS = {
    "<think>\nHm, </thin king.\n</think>\n\nFour.": (False, "Hm, </thin king.", "Four."),
    "\n<think>a</think>b</think>": (False, "a", "b</think>"),
    "Hm.\n</think>\n\nFour.": (True, "Hm.", "Four."),
    "<thinking>Four.": (False, "", "<thinking>Four."),
    "  Four.\n": (False, "", "  Four.\n"),
    "<think>never closed\n": (False, "never closed\n", ""),
    "<think></think>": (False, "", ""),
    "<thi": (False, "", "<thi"),
    "</think>\n\nFour.": (False, "", "Four."),
}
CALLS = {
    "Hm.\n<call>{}</call>": ("Hm.", "<call>{}</call>"),
    "<call>{}</call> Four.": ("", "<call>{}</call> Four."),
    "Hm <call>{}</call>.\n</think>Four.": ("Hm <call>{}</call>.", "Four."),
    "Hm <cal": ("Hm <cal", ""),
}


def read(parts: list[str], opened: bool) -> tuple[str, str]:
    reader = ReasoningReader(opened=opened)
    found = [reader.push(part, i == len(parts) - 1) for i, part in enumerate(parts)]
    return "".join(thoughts for thoughts, _ in found), "".join(reply for _, reply in found)


@pytest.mark.parametrize("text", TEXTS)
def test_every_way_to_cut_a_text_gives_the_same(text: str) -> None:
    opened, *wanted = TEXTS[text]
    cuts = itertools.combinations(range(1, len(text)), 2)
    for a, b in itertools.islice(cuts, 0, None, 3):
        assert read([text[:a], text[a:b], text[b:], ""], opened) == tuple(wanted)
    assert read([*text, ""], opened) == tuple(wanted) == read([text], opened)


@pytest.mark.parametrize("text", CALLS)
def test_a_call_ends_thoughts_that_are_never_closed(text: str) -> None:
    for cut in range(len(text)):
        reader = ReasoningReader(opened=True, call="<call>")
        found = [reader.push(text[:cut], False), reader.push(text[cut:], False), reader.push("", True)]
        assert ("".join(thoughts for thoughts, _ in found), "".join(reply for _, reply in found)) == CALLS[text]


def test_what_is_certain_is_not_held_back() -> None:
    reader = ReasoningReader()
    assert reader.push("<think>One, ", False) == ("One, ", "")
    assert reader.push("two</", False) == ("two", "")
    assert reader.push("think>Three", False) == ("", "Three")
    assert reader.push(" <think>", False) == ("", " <think>")


THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>{% endif %}"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(THINKING, encoding="utf-8")
    with running(toy_llm("none"), chat_template=str(template)) as (_, found):
        yield found


def replies(url: str, path: str, **body: Any) -> list[Any]:
    """The whole reply, and the same as events."""
    asked = {"messages": [{"role": "user", "content": "Hm"}], "max_tokens": 8, "temperature": 0, **body}
    whole = web.post(f"{url}{path}", json=asked, timeout=60).json()
    lines = web.post(f"{url}{path}", json={**asked, "stream": True}, timeout=60).text.splitlines()
    return [whole, *(json.loads(line[6:]) for line in lines if line.startswith("data: {"))]


def test_the_thoughts_of_a_chat_are_beside_its_text(url: str) -> None:
    """The toy never ends its thoughts, which its template opens."""
    whole, *events = replies(url, "/v1/chat/completions")
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] and message["content"] == ""
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    as_text, *_ = replies(url, "/v1/chat/completions", reasoning_format="none")
    assert as_text["choices"][0]["message"]["content"].lstrip("\n") == message["reasoning_content"]


def test_a_reply_in_a_form_has_none(url: str) -> None:
    whole, *_ = replies(url, "/v1/chat/completions", response_format={"type": "json_object"}, max_tokens=40)
    assert "reasoning_content" not in whole["choices"][0]["message"]


def test_anthropics_messages_have_a_block_of_them(url: str) -> None:
    whole, *events = replies(url, "/v1/messages")
    assert whole["content"][0]["type"] == "thinking" and whole["content"][0]["thinking"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"thinking_delta"}
    assert "".join(delta["thinking"] for delta in deltas) == whole["content"][0]["thinking"]
    again, *_ = replies(
        url,
        "/v1/messages",
        messages=[
            {"role": "user", "content": "Hm"},
            {"role": "assistant", "content": [*whole["content"][:1], {"type": "text", "text": "x"}]},
            {"role": "user", "content": "And?"},
        ],
    )
    assert again["type"] == "message"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (THINKING, "assistant: <think>Let me"),
        (THINKING.replace(" <think>", "{# <think></think> #}"), "assistant:<think>Let me"),
    ],
)
def test_thoughts_are_continued(template: str, end: str) -> None:
    """A last message that has thoughts alone is the beginning of a reply; a mark stands before them once."""
    reader = BodyReader(toy_llm("none", template=template), ServerConfig(served_name="toy"))
    messages = [{"role": "user", "content": "Hm"}, {"role": "assistant", "content": "", "reasoning_content": "Let me"}]
    asked = {"messages": messages, "continue_final_message": True}
    (job,) = reader.chat(ChatRequest.model_validate(asked))
    assert reader._llm.tokenizer.decode(job.prompt).endswith(end) and job.reply.reasoning is True
    assert reader.tokenize(TokenizeRequest.model_validate(asked)) == job.prompt
    (job,) = reader.chat(ChatRequest.model_validate(asked | {"reasoning_format": "none"}))
    assert job.reply.reasoning is None


def test_thoughts_are_not_continued_where_there_are_none() -> None:
    reader = BodyReader(toy_llm("none", template="{% for m in messages %}{{ m.content }}{% endfor %}"), ServerConfig())
    messages = [{"role": "user", "content": "Hm"}, {"role": "assistant", "content": "", "reasoning_content": "Let me"}]
    with pytest.raises(ApiError, match="thoughts alone"):
        reader.chat(ChatRequest.model_validate({"messages": messages, "continue_final_message": True}))


def test_thoughts_are_continued_in_their_channel() -> None:
    reader = ChannelReader(form_of("gpt-oss"), thinking=True)
    assert reader.push(" look.<|end|><|start|>assistant<|channel|>final<|message|>Four.", True)[:2] == (
        " look.",
        "Four.",
    )


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_marks_that_are_special_tokens_are_no_text(size: int) -> None:
    """Thoughts may follow a text, and a mark that stands alone is dropped; marks that are letters are text there."""
    marks = ThoughtMarks("<|c>thought", "<c|>")
    cases = [
        ("<|c>thought\nA.<c|>B.<c|>", "A.", "B."), ("<|c><|c>thought\nA.<c|>B.", "A.", "B."),
        ("A.<|c>thought\nB.<c|>\nC.<c|>", "B.", "A.C."), ("A <|c", "", "A <|c"), ("A <|c>", "", "A "),
        ("<|c>thought\nA.<c|>B <|c>thought", "A.", "B "),
    ]  # fmt: skip
    for text, thoughts, reply in cases:
        reader = ReasoningReader(marks=marks, special=[*marks, "<|c>"])
        parts = [reader.push(text[i : i + size], False) for i in range(0, len(text), size)] + [reader.push("", True)]
        assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (thoughts, reply), text
    assert ReasoningReader().push("A.</think>B.", True) == ("", "A.</think>B.")


def test_special_tokens_of_thoughts_are_known_by_the_tokenizer() -> None:
    template = (
        "{% for m in messages %}{{ '<|c>thought\n' + m.reasoning_content + '<c|>' if m.reasoning_content }}"
        "{{ m.content }}{% endfor %}"
    )
    asked = {"messages": [{"role": "user", "content": "Hm"}]}
    for special, text in ((("<|c>", "<c|>"), "A."), (("<|c>",), "A.<c|>"), ((), "A.<c|>")):
        llm = toy_llm("none", template=template, marks=special)
        (job,) = BodyReader(llm, ServerConfig(served_name="toy")).chat(ChatRequest.model_validate(asked))
        sample = Sample(job, None, llm.tokenizer, lambda count: "0" * count)  # type: ignore[arg-type]
        step = Step("A.<c|>", tuple(llm.tokenizer("A.<c|>")["input_ids"]), finish_reason="stop")
        assert sample.read(Event(job, step)).text == text


def test_thoughts_that_words_of_the_prompt_begin() -> None:
    """The mark behind them is where the template cuts earlier replies."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('[FINAL]')[-1] }}{% endfor %}"
        "{{ '<|assistant|>I think:\n' if add_generation_prompt }}"
    )
    for written, marks in ((template, ("I think:", "[FINAL]")), (template.replace("I think:", ""), None)):
        reader = BodyReader(toy_llm("none", template=written), ServerConfig(served_name="toy"))
        assert reader.form.thoughts == marks
        (job,) = reader.chat(ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hm"}]}))
        assert job.reply.reasoning == (None if marks is None else True)
